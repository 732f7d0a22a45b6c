"""How each side trains, and which signal a rank of it gets."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from peers_install import Environment
from scenarios import LIMIT_S, Figures, Turn
from step_board import Board, discarded, lost, sent
from trial import WORKERS, Side, started

VICTIM, STEP = 2, 57
WORKLOAD = ("--width=256", "--pause=0.05")
AFTER = 3  # further steps of all ranks: a discarded batch is visible at a later one
PEERS = WORKERS / "peers"

TORCHFT = Environment("torchft", ("torchft-nightly", "numpy"))
NVRX = Environment("nvrx", ("nvidia-resiliency-ext==0.4.1", "numpy"))


@dataclass(frozen=True, slots=True)
class Way:
    """One side: which worker it runs, and under which command."""

    worker: str
    program: str  # in the environment's folder of programs
    words: tuple[str, ...]
    environment: Environment | None = None  # None: where this runs

    def side(self, name: str, bin_: Path) -> Side:
        """Make the side, with the programs in that folder."""
        return Side(name, (str(bin_ / self.program), *self.words))


MSRUN = Way("guarded.py", "msrun", ("--max-restarts=1",))
TORCHFT_WAY = Way("peers/replica.py", "python", (str(PEERS / "replicas.py"), "1"), TORCHFT)
SPARE = Way("peers/wrapped.py", "python", (str(PEERS / "spares.py"),), NVRX)
HEARTBEAT = Way(
    "peers/heartbeat.py",
    "ft_launcher",
    (
        *("--nnodes=1", "--max-restarts=3", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=127.0.0.1:0", f"--fault-tol-cfg-path={PEERS / 'heartbeat.yaml'}"),
    ),
    NVRX,
)
KILL = {"torchft": TORCHFT_WAY, "NVRx in-process": SPARE, "msrun": MSRUN}
SHARDED = {
    "torchrun, DCP async_save": Way("peers/saved_each_step.py", "torchrun", ("--max-restarts=3",)),
    "torchft": Way(
        "peers/sharded_replica.py", "python", (str(PEERS / "replicas.py"), "4"), TORCHFT
    ),
    "msrun": Way("sharded.py", "msrun", ("--max-restarts=1",)),
}
HANG = {"NVRx ft_launcher": HEARTBEAT, "msrun": MSRUN}


def kill(turn: Turn) -> Figures:
    """``kill -9`` of a rank; torchft with one rank in a group, NVRx with a spare rank."""
    return struck(turn, KILL[turn.side.name], signal.SIGKILL, "--every=10")


def hang(turn: Turn) -> Figures:
    """``SIGSTOP`` of a rank; NVRx with a hand-set heartbeat of 3 s, msrun without any setting."""
    return struck(turn, HANG[turn.side.name], signal.SIGSTOP, "--every=10")


def sharded(turn: Turn) -> Figures:
    """``kill -9`` of a rank of an HSDP model of two replicas; torchrun saves in each step."""
    return struck(turn, SHARDED[turn.side.name], signal.SIGKILL, "--every=1")


def struck(turn: Turn, way: Way, signum: int, *words: str) -> Figures:
    """Strike a rank until all are past their next step."""
    # one thread each, as torchrun and msrun set it if a node has several ranks
    environ = {"PYTHONPATH": str(WORKERS), "OMP_NUM_THREADS": "1"}
    # else restarted gloo ranks of torchrun read dead addresses in the store that all attempts share
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = (*WORKLOAD, *words)
    with started(turn.side, way.worker, *words, nproc=turn.nproc, environ=environ) as trial:
        board = Board(trial)
        ranks = board.wait_all(turn.nproc, STEP, LIMIT_S)
        struck_s = sent(ranks[VICTIM], signum)
        back = board.wait_again(turn.nproc, struck_s, LIMIT_S)
        board.wait_all(turn.nproc, max(line.step for line in board.lines) + AFTER, LIMIT_S)
    return {
        "again": back.at_s - struck_s,
        "lost": lost(board.lines, back),
        "discarded": discarded(board.lines, struck_s, back),
        "anew": back.new,
    }
