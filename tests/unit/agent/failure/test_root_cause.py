"""Of many deaths the first cause is found, and what usually lies behind it is said."""

from dataclasses import replace

import pytest

from agent.failure.evidence import ErrorFile, Evidence, WorkerEnd
from agent.failure.hints import HINTS, hint
from agent.failure.log_excerpt import Traceback, find_fatal
from agent.failure.report import headline
from agent.failure.root_cause import find_cause, is_consequence

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50088."
TIMEOUT = "RuntimeError: [gloo/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


def told(
    rank,
    said=None,
    *,
    code=1,
    signal=None,
    at=100.0,
    order=None,
    ours=False,
    tail=(),
    origin=None,
    written=None,
    oom=0,
    elsewhere=0,
):
    """Evidence of one rank: ``said`` is its exception, ``written`` the time in its error file."""
    end = WorkerEnd(
        rank,
        rank,
        1000 + rank,
        "node",
        None if signal else code,
        signal,
        at,
        rank if order is None else order,
        ours,
    )
    logged = None if said is None else Traceback(f"Traceback\n{said}", said, origin or said, 0)
    error = None if written is None else ErrorFile(said or "", None, written, {})
    return Evidence(
        end=end,
        error=error,
        logged=logged,
        log_tail=tuple(tail),
        oom_kills=oom,
        oom_elsewhere=elsewhere,
    )


HISTORIES = {
    "one rank fails, the others are stopped": ([told(0, signal=15, ours=True), told(3, "ValueError: boom")], 3, "the only rank that failed"),
    "the peer of a killed rank is seen first": ([told(0, GLOO, order=0), told(3, signal=9, order=1)], 3, "lost their connection to a peer"),
    "the peer of a failing rank is seen first": ([told(0, GLOO, at=99.0, order=0), told(3, "ValueError: boom", at=102.0, order=1)], 3, "lost their connection to a peer"),
    "two independent failures, the earlier one": ([told(0, "ValueError: a", at=110.0, order=1), told(3, "KeyError: b", at=100.0, order=0)], 3, "10 s before rank 0"),
    "two failures at once, the order of detection": ([told(0, "ValueError: a", at=100.0, order=1), told(3, "KeyError: b", at=100.4, order=0)], 3, "first seen to fail"),
    "an error file's time beats a late exit": ([told(0, "ValueError: a", at=100.0, order=0), told(3, "KeyError: b", at=101.0, order=1, written=90)], 3, "10 s before rank 0"),
    "an error file's whole second decides nothing": ([told(0, "ValueError: a", at=100.9, order=0), told(3, "KeyError: b", at=101.0, order=1, written=100)], 0, "first seen to fail"),
    "an error file from 1970 is not believed": ([told(0, "ValueError: a", at=100_000.0, order=0), told(3, "KeyError: b", at=100_000.5, order=1, written=10)], 0, "first seen to fail"),
    "an error file from the future is not believed": ([told(0, "ValueError: a", at=100.0, order=0, written=10**30), told(3, "KeyError: b", at=99.0, order=1)], 0, "first seen to fail"),
    "all lost a peer": ([told(0, GLOO, order=1), told(3, GLOO, order=0)], 3, "every failed rank lost a peer"),
    "one timed out waiting for a rank that hung": ([told(0, TIMEOUT), told(3, signal=15, ours=True)], 0, "one hangs or was too late"),
    "the culprit was stopped while it was dying": ([told(0, GLOO), told(3, "ValueError: boom", signal=15, ours=True)], 3, "failed by itself when msrun stopped it"),
    "a stopped rank that only says so is no culprit": ([told(0, GLOO), told(3, "KeyboardInterrupt", signal=2, ours=True)], 0, "no other rank here failed"),
    "a stopped rank does not beat a real failure": ([told(0, "ValueError: a"), told(3, "KeyError: b", ours=True)], 0, "the only rank that failed"),
    "a rank that ended well is no failure": ([told(0, code=0, order=0), told(3, code=7, order=1)], 3, "the only rank that failed"),
}  # fmt: skip


@pytest.mark.parametrize(("evidence", "root", "reason"), HISTORIES.values(), ids=HISTORIES)
def test_the_root_is_found_with_its_reason(evidence, root, reason):
    for order in (evidence, evidence[::-1]):
        cause = find_cause(order)
        assert cause is not None
        assert cause.root.end.rank == root
        assert reason in cause.reason


@pytest.mark.parametrize("evidence", [[], [told(0, code=0)], [told(0, signal=15, ours=True)]])
def test_without_a_failure_there_is_no_cause(evidence):
    assert find_cause(evidence) is None


def test_every_rank_is_in_exactly_one_place():
    ends = [
        told(0, GLOO),
        told(1, "KeyError: b", at=120.0),
        told(2, signal=15, ours=True),
        told(3, signal=9),
        told(4, code=0, ours=True),
    ]
    cause = find_cause(ends)
    assert cause is not None
    assert [each.end.rank for each in cause.failures] == [0, 1, 3]
    assert [each.end.rank for each in cause.consequences] == [0]
    assert [each.end.rank for each in cause.others] == [1]
    assert cause.stopped == (2, 4)


PEERS = [
    GLOO,
    TIMEOUT,
    "RuntimeError: [/x/pair.cc:537] Read error [127.0.0.1]:59583: Connection reset by peer. This is",
    "RuntimeError: Gloo connectFullMesh failed with [/x/pair.cc:144] no error",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
    "RuntimeError: [3]: params[0] ... [TCPStore] sendBytes failed on SocketImpl: Broken pipe",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.19.3",
    "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 1800000 ms",
]


@pytest.mark.parametrize("said", PEERS)
def test_a_lost_peer_is_a_consequence(said):
    assert is_consequence(told(0, said))


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: boom",
        "ConnectionResetError: [Errno 104] Connection reset by peer",  # a download's, perhaps
        "BrokenPipeError: [Errno 32] Broken pipe",
        "TimeoutError: timed out",
    ],
)
def test_an_own_error_is_no_consequence(said):
    assert not is_consequence(told(0, said))


def test_the_first_exception_of_a_chain_decides():
    assert is_consequence(told(0, "train.StepFailed: step 3", origin=GLOO))
    assert not is_consequence(told(0, GLOO, origin="ValueError: boom"))


def test_an_error_files_chain_decides_too():
    link = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    stack = f"Traceback (most recent call last):\n  File\nKeyError: 1{link}Traceback (most recent call last):\n  File\n{GLOO}\n"
    error = ErrorFile(GLOO, stack, 100, {})
    assert not is_consequence(Evidence(told(0).end, error=error))
    assert is_consequence(Evidence(told(0).end, error=ErrorFile(GLOO, None, 100, {})))


WATCHDOG = "[E1120 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 ms"


def test_a_watchdogs_abort_is_a_consequence_with_and_without_faulthandler():
    assert is_consequence(told(0, signal=6, tail=[WATCHDOG, "terminate called"]))
    fatal = find_fatal(
        [WATCHDOG, "terminate called", "Fatal Python error: Aborted", "", "Current thread 0x1"]
    )
    assert is_consequence(Evidence(told(0, signal=6).end, logged=fatal))


def test_a_killed_ranks_last_lines_are_not_its_last_words():
    assert not is_consequence(told(0, signal=9, tail=["retrying:", GLOO]))


CASES = [
    (told(0, signal=9, oom=1), "killed by the kernel because memory ran out"),
    (told(0, signal=9, elsewhere=1), "killed perhaps by the kernel because memory ran out"),
    (told(0, signal=9, oom=1, elsewhere=1), "killed by the kernel because memory ran out"),
    (told(0, code=137, oom=1), "killed by the kernel because memory ran out"),
    (told(0, signal=9), "kill -9, or a time or memory limit of Slurm or Kubernetes"),
    (told(0, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", oom=1), "the kernel killed a DataLoader worker"),
    (told(0, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."), "/dev/shm"),
    (told(0, signal=7), "/dev/shm"),
    (told(0, signal=11), "PYTHONFAULTHANDLER=1"),
    (told(0, signal=6), "gave up (abort)"),
    (told(0, signal=6, tail=[WATCHDOG]), "a collective did not finish in time"),
    (told(0, signal=4), "instructions that this CPU does not have"),
    (told(0, signal=8), "divided an integer by zero"),
    (told(0, signal=15), "msrun did not send it"),
    (told(0, signal=24), "CPU time"),
    (told(0, TIMEOUT), "did not come to the same collective"),
    (told(0, "OSError: [Errno 98] Address already in use"), "--master-port"),
    (told(0, "torch.distributed.DistNetworkError: The server socket has failed to listen (errno: 98 - Address already in use)."), "--master-port"),
    (told(0, "ModuleNotFoundError: No module named 'einops.layers'"), "module einops.layers is not installed for /opt/python:"),
    (told(0, tail=["/opt/python: No module named train_it"]), "module train_it is not"),
    (told(0, tail=["/opt/python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')"]), "module a is not"),
    (told(0, "AssertionError: Torch not compiled with CUDA enabled"), "CPU build"),
    (told(0, "RuntimeError: Found no NVIDIA driver on your system. Please check that"), "sees no NVIDIA GPU"),
    (told(0, "RuntimeError: No CUDA GPUs are available"), "CUDA_VISIBLE_DEVICES"),
    (told(5, "torch.AcceleratorError: CUDA error: invalid device ordinal\nCUDA kernel errors"), "local rank 5 asked for a GPU that is not there"),
    (told(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), "the GPU's memory is full"),
    (told(0, code=2, tail=["/opt/python: can't open file '/w/nofile.py': [Errno 2] No such file or directory"]), "there is no script /w/nofile.py"),
    (told(0, code=2, tail=["train.py: error: the following arguments are required: --local-rank"]), "LOCAL_RANK"),
    (told(0, code=127, tail=["run.sh: line 3: python4: command not found"]), "look at PATH"),
    (told(0, code=126, tail=["run.sh: line 3: ./train: Permission denied"]), "chmod +x"),
    (told(0, "ValueError: Default process group has not been initialized, please make sure to call init_process_group."), "init_process_group() was called"),
    (told(0, "MemoryError"), "memory ran out"),
    (told(0, "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8. TiB"), "memory ran out"),
    (told(0, "OSError: [Errno 24] Too many open files: 'x'"), "ulimit -n"),
    (told(0, "RuntimeError: can't start new thread"), "ulimit -u"),
    (told(0, "OSError: [Errno 28] No space left on device"), "a disk is full"),
    (told(0, code=139), "139 is how a shell reports that its command was ended by SIGSEGV"),
    (told(0, "train.Failed: x", origin="torch.OutOfMemoryError: CUDA out of memory."), "the GPU's memory is full"),
]  # fmt: skip


@pytest.mark.parametrize(("evidence", "words"), CASES, ids=[words for _, words in CASES])
def test_a_known_cause_has_its_hint(evidence, words):
    assert words in (hint(evidence, "/opt/python") or "")


@pytest.mark.parametrize(
    "evidence",
    [
        told(
            0,
            "ValueError: boom",
            tail=["OSError: [Errno 98] Address already in use", "ValueError: boom"],
        ),
        told(0, "ValueError: boom", oom=3),
        told(0, code=1),
        told(0, code=2, tail=["usage: train.py [-h] --lr LR"]),
        told(0, code=127),
        told(0, code=126),
        told(0, "SystemExit: 137", code=137),
        told(0, "RuntimeError: MemoryErrors are fun"),
        told(0, signal=34),
        told(0, "ValueError: {not} a {format} %s string {0}"),
    ],
)
def test_no_hint_is_better_than_a_wrong_one(evidence):
    assert hint(evidence, "/opt/python") is None


REFUSALS = (
    "train.py: error: unrecognized arguments: --is_recover=1",
    "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--is_recover=1']",
    "ValueError: Unknown config key: is_recover",
)


@pytest.mark.parametrize("said", REFUSALS)
def test_an_argument_that_msrun_appended_and_the_script_refuses_is_named(said):
    evidence = told(0, code=2, tail=("usage: train.py [-h]", said))
    assert hint(evidence, "/opt/python") is None  # msrun appended nothing
    evidence = replace(evidence, end=replace(evidence.end, told="--is_recover=1"))
    assert hint(evidence, "/opt/python") == (
        "msrun appended --is_recover=1 to the script's arguments because the rank resumes "
        "(--recover-arg= leaves it out)"
    )
    other = replace(evidence, log_tail=("ValueError: bad",))
    assert hint(other, "/opt/python") is None


def test_words_of_the_worker_cannot_break_a_hint():
    said = told(
        0,
        code=2,
        tail=["python: can't open file '{0.__class__}{local_rank}': [Errno 2] No such file"],
    )
    assert (
        hint(said, "/opt/{x}")
        == "there is no script {0.__class__}{local_rank}: look at its name and at the folder msrun was started in"
    )


def test_every_hint_is_one_short_sentence():
    for _, sentence in HINTS:
        assert len(sentence) < 220
        assert "\n" not in sentence
        assert not sentence.endswith(".")


def left_amid(rank):
    end = told(rank, code=0).end
    return Evidence(end=replace(end, amid="in forward of step 14"))


def test_a_rank_that_exited_with_0_amid_training_is_the_root_of_those_that_miss_it():
    cause = find_cause([left_amid(2), told(1, GLOO), told(0, GLOO)])
    assert (cause.root.end.rank, cause.reason) == (
        2,
        "the other failures are consequences: those ranks lost their connection to a peer",
    )
    assert headline(cause.root.end).endswith(
        "exited with code 0 in forward of step 14, amid training"
    )
    assert {each.end.rank for each in cause.consequences} == {0, 1}
    cause = find_cause([left_amid(2), told(1, "ValueError: bug"), told(0, GLOO)])
    assert cause.root.end.rank == 1  # a failure of its own explains the rest
    assert find_cause([left_amid(2), left_amid(1)]) is None
