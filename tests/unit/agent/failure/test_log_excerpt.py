"""What is found in the end of a log written by a stranger."""

import pytest

from agent.failure.log_excerpt import find_fatal, find_traceback
from agent.text.log_lines import last_lines, log_lines
from agent.text.sanitize import sanitized

PLAIN = """Traceback (most recent call last):
  File "train.py", line 8, in <module>
    raise ValueError("boom")
ValueError: boom"""
CHAINED = """Traceback (most recent call last):
  File "a.py", line 8, in <module>
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 9, in <module>
RuntimeError: two
lines"""
IGNORED = """Exception ignored in: <function D.__del__ at 0x7f>
Traceback (most recent call last):
  File "a.py", line 6, in __del__
OSError: del"""
THREAD = """Exception in thread Thread-1 (g):
Traceback (most recent call last):
  File "threading.py", line 1045, in _bootstrap_inner
KeyError: 't'"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "<string>", line 1, in <module>
  | ExceptionGroup: g (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | TypeError: x
    +------------------------------------"""
SYNTAX = """  File "/tmp/s.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax"""
LOADER = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    for x in loader:
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 309, in _worker_loop
    data = fetcher.fetch(index)
ValueError: bad item"""
NCCL = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error
ncclRemoteError: A call failed possibly due to a network error
Last error:
socketProgress: Connection closed by remote peer"""
FATAL = """Fatal Python error: Segmentation fault

Current thread 0x00007f47ca9bab80 (most recent call first):
  File "ctypes/__init__.py", line 519 in string_at
  File "<string>", line 3 in f

Thread 0x00007f47ca9bab81 (most recent call first):
  File "threading.py", line 3 in wait"""
DURING = "During handling of the above exception, another exception occurred:"
BARE = "Traceback (most recent call last):\nKeyboardInterrupt"


def prefixed(text):
    return "\n".join(f"[rank3]: {line}" if line else "" for line in text.split("\n"))


def lines(text):
    return log_lines(text.encode(), cut=False)


@pytest.mark.parametrize(
    ("log", "text", "message", "after"),
    [
        (f"epoch 1\n{PLAIN}\n", PLAIN, "ValueError: boom", 0),
        (f"{BARE}\n", BARE, "KeyboardInterrupt", 0),
        (f"x\n{CHAINED}\n", CHAINED, "RuntimeError: two\nlines", 0),
        (f"{PLAIN}\n{IGNORED}\n", PLAIN, "ValueError: boom", 4),
        (f"{PLAIN}\n{THREAD}\n", PLAIN, "ValueError: boom", 4),
        (f"{THREAD}\n\nbye\n", THREAD.split("\n", 1)[1], "KeyError: 't'", 1),
        (f"{CHAINED}\n\n{PLAIN}\n", PLAIN, "ValueError: boom", 0),
        (f"x\n{GROUP}\n", GROUP, "ExceptionGroup: g (2 sub-exceptions)", 0),
        (f"x\n{SYNTAX}\n", SYNTAX, "SyntaxError: invalid syntax", 0),
        (LOADER, LOADER, LOADER.split("\n", 3)[3], 0),
        (NCCL, NCCL, NCCL.split("\n", 2)[2], 0),
        (f"{prefixed(PLAIN)}\n[rank3]:[W1120 x.cpp:5] Warning: leak\n", PLAIN, "ValueError: boom", 1),
        (f"{prefixed(CHAINED)}\n", CHAINED, "RuntimeError: two\nlines", 0),
        (f"{PLAIN}\nterminate called without an active exception\n", PLAIN, "ValueError: boom", 1),
        (PLAIN.replace("boom", "\x1b[31mboom\x1b[0m"), PLAIN, "ValueError: boom", 0),
        (PLAIN.replace("\n", "\r\n"), PLAIN, "ValueError: boom", 0),
    ],
)  # fmt: skip
def test_the_last_whole_traceback_is_found(log, text, message, after):
    found = find_traceback(lines(log))
    assert found is not None
    assert (found.text, found.message, found.lines_after) == (text, message, after)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "nothing here\n",
        PLAIN.rsplit("\n", 1)[0],  # no exception line: it was cut off
        PLAIN.split("\n", 1)[1],  # no header: it was cut off
        PLAIN.replace("ValueError: boom", "step 12 loss 3.4"),  # another writer cut in
        IGNORED,  # did not end anything
        'see File "a.py", line 3\nValueError: text',
        GROUP.split("\n", 1)[0],
    ],
)
def test_what_is_no_whole_traceback_is_none(log):
    assert find_traceback(lines(log)) is None


def test_a_chained_traceback_names_its_first_exception_too():
    found = find_traceback(lines(f"{CHAINED}\n\n{DURING}\n\n{PLAIN}"))
    assert found is not None
    assert (found.message, found.origin) == (
        "ValueError: boom",
        "ZeroDivisionError: division by zero",
    )


def test_an_incomplete_traceback_does_not_hide_the_whole_one_before_it():
    found = find_traceback(lines(f"{PLAIN}\n\nTraceback (most recent call last):\n  File"))
    assert found is not None
    assert found.message == "ValueError: boom"


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (f"x\n{FATAL}\n\nExtension modules: numpy (total: 1)\n", f"{FATAL}\n\nExtension modules: numpy (total: 1)"),
        (f"{FATAL}\nnot part of it", FATAL),
        (FATAL.split("\n", 2)[2], FATAL.split("\n", 2)[2]),
    ],
)  # fmt: skip
def test_what_faulthandler_printed_is_found(log, text):
    found = find_fatal(lines(log))
    assert found is not None
    assert found.text == text
    assert found.message == text.split("\n")[0]


def test_log_lines_show_what_a_terminal_would_have_shown():
    raw = b"half line\n 1%\r 50%\r100%\r\n\xff\xfe\n[rank12]: x\n\x1b[1;32mgreen\x1b[0m\n"
    assert log_lines(raw, cut=True) == ["100%", "\ufffd\ufffd", "x", "green", ""]


def test_a_cut_log_of_one_line_keeps_it():
    assert log_lines(b"one", cut=True) == ["one"]


def test_last_lines_skip_blank_ones_at_the_end():
    assert last_lines(["a", "b", "", " ", ""], 1) == ("b",)
    assert last_lines([""], 5) == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tnewline\n", "tab\tnewline\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2Jx\x00\x7f\x9b", "\\x1b[2Jx\\x00\\x7f\\x9b"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\rb", "a\\x0db"),
        ("evil\u202etxt", "evil\\u202etxt"),
        ("ünïcödé 🏖️", "ünïcödé 🏖️"),
    ],
)
def test_control_characters_are_spelled_not_sent(text, shown):
    assert sanitized(text) == shown


def test_a_hostile_log_is_read_in_time():
    hostile = "\n".join(["Traceback (most recent call last):", *["  " * 20] * 40] * 30)
    assert find_traceback(lines(hostile)) is None
    assert find_traceback(lines("[" * 65536)) is None
