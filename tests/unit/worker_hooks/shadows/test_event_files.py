"""A copy of a process writes TensorBoard's events on, as if its thread had come along."""

import json
import subprocess
import sys

import pytest
from support.jobs import DEADLINE_S, ROOT

# What matters of TensorBoard 2.21.
STAND_IN = """
import os, queue, threading, time, types, sys
class File:
    fs_supports_append = True
    def __init__(self, filename): self.filename = filename; open(filename, "wb").close()
    def write(self, data):
        time.sleep(0.05)
        with open(self.filename, "ab") as file: file.write(data)
File.__module__ = "tensorboard.compat.gfile"
class _AsyncWriterThread(threading.Thread):
    def __init__(self, waiting, writer):
        super().__init__(daemon=True)
        self._queue, self._record_writer = waiting, writer
    def run(self):
        while True:
            data = self._queue.get(True, 60)
            if data is None: return
            self._record_writer._writer.write(data)
            self._queue.task_done()
module = types.ModuleType("tensorboard.summary.writer.event_file_writer")
module._AsyncWriterThread = _AsyncWriterThread
sys.modules[module.__name__] = module
path = sys.argv[1]
waiting = queue.Queue(10)
thread = _AsyncWriterThread(waiting, types.SimpleNamespace(_writer=File(path)))
thread.start()
write, flush = waiting.put, waiting.join
"""
SCRIPT = """
import json, os, sys, threading, time
sys.path.insert(0, {root!r})
from worker_hooks.shadows import event_files
{writer}
for number in range(5):
    write(b"before %d\\n" % number)
assert event_files.threads() == {{id(thread)}}
with event_files.still() as found:
    why, before = found.why_not, open(path).read()
    goes, told = os.pipe()
    copy = os.fork()
if copy:
    write(b"lost\\n")
    flush()
    with_lost = open(path).read()
    os.write(told, b"x")
    os.waitpid(copy, 0)
    print(json.dumps([why, before, with_lost, open(path).read()]))
    os._exit(0)
os.read(goes, 1)
found.go_on()
for number in range(30):
    write(b"after %d\\n" % number)
flush()
os._exit(0)
"""


def run(tmp_path, writer=STAND_IN):
    path = tmp_path / "events"
    script = SCRIPT.format(root=str(ROOT), writer=writer)
    words = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_what_was_written_behind_the_copy_is_written_again(tmp_path):
    why, before, with_lost, after = run(tmp_path)
    assert not why
    assert before == "".join(f"before {number}\n" for number in range(5))
    assert with_lost == before + "lost\n"
    assert after == before + "".join(f"after {number}\n" for number in range(30))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ('thread._record_writer._writer.filename = "/nowhere/events"', "No such file"),
        ("File.fs_supports_append = False", "it writes by tensorboard.compat.gfile"),
        ('File.__module__ = "tensorflow.io"', "it writes by tensorflow.io"),
        ("del thread._record_writer", "'_record_writer'"),
    ],
)
def test_another_writer_is_refused(tmp_path, change, reason):
    lines = f"""
write(b"before\\n"); flush()
{change}
with event_files.still() as found:
    print(json.dumps(found.why_not))
os._exit(0)
"""
    told = run(tmp_path, STAND_IN + lines)
    assert told.startswith("TensorBoard's writer is not known to go on in a copy (")
    assert reason in told


def test_a_writer_of_another_kind_is_refused(tmp_path):
    lines = """
thread._queue = None
with event_files.still() as found:
    print(json.dumps(found.why_not))
os._exit(0)
"""
    assert run(tmp_path, STAND_IN + lines) == "this TensorBoard's writer is not known"


def test_no_thread_of_tensorboard_is_no_reason():
    from worker_hooks.shadows import event_files

    assert event_files.threads() == frozenset()
    with event_files.still() as found:
        assert not found.why_not
    found.go_on()
