"""A job whose nodes meet."""

import pytest
from support.meeting_nodes import meeting


@pytest.fixture
def job():
    with meeting() as job:
        yield job
