"""A job that nodes come to."""

import pytest
from support.meeting_nodes import meeting


@pytest.fixture
def job():
    with meeting() as job:
        yield job
