"""A job whose nodes meet."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.meeting_nodes import Job


@pytest.fixture
def job():
    with ThreadPoolExecutor(16) as pool:
        job = Job(pool)
        yield job
    for each in job.closes:
        each.close()
