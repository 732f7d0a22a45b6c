"""What tests of the gate share."""

import sys

import pytest


@pytest.fixture(name="_hurried")
def hurried():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
