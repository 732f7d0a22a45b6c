"""Status pages, a rank's view and the agent's."""

from __future__ import annotations

import ctypes

from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import status_page as page_module
from worker_hooks.contract.status_page import Entry, Page

ENTRIES = (Entry("rng", "U8", (16,), 16),)


def make(rank=0, attempt=0, entries=ENTRIES):
    """A worker's page and its own view of it."""
    fd = page_module.create(rank, attempt, entries)
    return fd, Page(fd)


def write(page, step, byte, *, is_commit=True):
    page.write(
        step,
        2,
        step * 10,
        b'{"at": 1}',
        lambda to: ctypes.memset(to, byte, 16),
        is_commit=is_commit,
    )


def kept(rank=0, attempt=0):
    pages = StatusPages()
    fd, page = make(rank, attempt)
    pages.keep(rank, attempt, fd)
    return pages, page
