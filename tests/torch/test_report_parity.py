"""Our report block is the one torch itself would print for the same data."""

import json
import socket
from dataclasses import replace

import pytest

from agent.failure.evidence import Evidence, WorkerEnd, gather
from agent.failure.root_cause import Cause
from agent.failure.torchrun_report import block

pytestmark = pytest.mark.torch
errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")

STACK = 'Traceback (most recent call last):\n  File "train.py", line 8, in <module>\nValueError: a rather long message that goes beyond sixty characters\n'
RECORDED = {
    "message": {
        "message": "ValueError: x",
        "extraInfo": {"py_callstack": STACK, "timestamp": "1700000000"},
    }
}
NO_STACK = {"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1700000000"}}}
SHORT = {"message": "boom\nline two", "timestamp": 1700000000}
EMPTY = {"message": "", "timestamp": "1700000000"}


def evidence(tmp_path, rank, exitcode, written):
    path = tmp_path / f"{rank}.json"
    if written is not None:
        path.write_text(json.dumps(written))
    code, signal = (exitcode, None) if exitcode >= 0 else (None, -exitcode)
    at = 1_700_000_000.0 + rank
    return gather(
        WorkerEnd(
            rank, rank % 4, 100 + rank, socket.getfqdn(), code, signal, at, rank, error_file=path
        )
    )


def torchs(script, found: tuple[Evidence, ...]):
    failures = {}
    for each in found:
        end = each.end
        failure = errors.ProcessFailure(end.local_rank, end.pid, end.exitcode, str(end.error_file))
        if each.error is None:
            failure.timestamp = int(end.at_epoch_s)
        failures[end.rank] = failure
    return errors.ChildFailedError(script, failures).format_msg()


@pytest.mark.parametrize(
    "ends",
    [
        [(1, None)],
        [(-9, None)],
        [(-6, RECORDED)],
        [(1, RECORDED)],
        [(1, NO_STACK)],
        [(255, SHORT)],
        [(1, EMPTY)],
        [(-11, EMPTY)],
        [(-40, None)],
        [(-9, None), (1, RECORDED), (2, SHORT), (-15, None), (3, None)],
    ],
    ids=lambda ends: "+".join(str(code) for code, _ in ends),
)
@pytest.mark.parametrize("script", ["train.py", "/a/very/long/path/" + "x" * 80 + "/train.py"])
def test_the_block_is_torchs_own(tmp_path, ends, script):
    found = tuple(evidence(tmp_path, rank, code, data) for rank, (code, data) in enumerate(ends))
    cause = Cause(found[0], "", found[1:], (), (7,))
    assert block(cause, script) == torchs(script, found)


def test_the_order_in_which_we_collected_does_not_matter(tmp_path):
    found = tuple(evidence(tmp_path, rank, 1, None) for rank in range(3))
    shuffled = Cause(found[0], "", (found[2],), (found[1],))
    assert block(replace(shuffled), "t.py") == torchs("t.py", found)
