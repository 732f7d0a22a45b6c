"""What tests of the gate share: a main thread's part, and waiting."""

import threading
import time

from worker_hooks.guard.gate import Gate

LONG_S = 20.0


def until(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def never():
    return False


def closed(gate, grace_s, is_complete):
    """Close it from a listener, while the main thread stands still."""
    found = []
    listener = threading.Thread(target=lambda: found.append(gate.close(grace_s, is_complete)))
    listener.start()
    listener.join()
    return found[0]


class Rank:
    """A main thread's part: a step that two writes make, and a commit that two writes make."""

    def __init__(self):
        self.half = self.other = self.step = self.noted = 0
        self.gate = Gate(lambda: self.step)

    def update(self):
        self.gate.begin_update()
        self.half += 1
        self.other += 1
        self.gate.end_update()

    def note(self):
        self.step += 1
        self.noted += 1

    def commit(self):
        self.gate.commit(self.note)
        return self.gate.pause()

    def look(self):
        return self.half, self.other, self.step, self.noted


class Watched(Gate):
    """Calls something right after the main thread has looked whether the gate is shut."""

    looked = staticmethod(lambda: None)

    @property
    def needs_slow_path(self):
        shut, looked = self.shut, self.looked
        if threading.current_thread() is threading.main_thread():
            self.looked = lambda: None
            looked()
        return shut

    @needs_slow_path.setter
    def needs_slow_path(self, shut):
        self.shut = shut


def training(*calls):
    """Run calls one after the other in a thread; returns what is over so far, and the thread."""
    done = []

    def run():
        for call in calls:
            call()
            done.append(call)

    thread = threading.Thread(target=run)
    thread.start()
    return done, thread
