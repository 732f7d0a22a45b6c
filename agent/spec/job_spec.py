"""The one frozen description of a job that flags, YAML and environment are turned into.

Everything below the command line reads this and nothing else. Values are already checked. What is
needed before the first fork consists of named tuples: dataclasses cost 25 ms of start-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntFlag
from pathlib import Path
from typing import NamedTuple

from agent.spec.device_plan import DevicePlan
from agent.spec.spent_budget import SpentBudget
from worker_hooks.contract.env import AUDIT_SHARE


class UsageError(Exception):
    """The request is wrong: one sentence that says what to do instead; exit code 2."""

    exit_code = 2


class NotStartedError(UsageError):
    """The job cannot begin because of another node: one sentence, with an exit code of its own."""

    def __init__(self, why: str, exit_code: int = 1) -> None:
        super().__init__(why)
        self.exit_code = exit_code


class StoppedEarlyError(NotStartedError):
    """Somebody has asked the job to end before all its nodes were here."""

    def __init__(self, why: str, signum: int, *, is_for_all: bool = False) -> None:
        """``is_for_all``: the other nodes are not to wait any longer."""
        super().__init__(why, 128 + signum)
        self.signum, self.is_for_all = signum, is_for_all


class LeftEarlyError(NotStartedError):
    """The msrun of a node was asked to end while nodes meet again, which do so without it."""

    def __init__(self, why: str) -> None:
        super().__init__(why, 0)


class Std(IntFlag):
    """Which of a worker's streams, with torchrun's numbers for ``--redirects`` and ``--tee``."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class ProgramKind(Enum):
    """How a worker's command line is built from the program's name."""

    SCRIPT = "script"  # python -u NAME ARGS
    MODULE = "module"  # python -u -m NAME ARGS
    PROGRAM = "program"  # NAME ARGS (--no-python)
    RUN_PATH = "run_path"  # runpy.run_path(NAME) in a python of its own (--run-path)


class StartMethod(Enum):
    """How workers are started."""

    AUTO = "auto"  # fork a warm interpreter where that is safe, else start a fresh one
    SPAWN = "spawn"  # always a fresh interpreter


class Program(NamedTuple):
    """What every rank runs. ``args`` may still hold ``${local_rank}``."""

    name: str
    args: tuple[str, ...]
    kind: ProgramKind
    interpreter: str


class Timeouts(NamedTuple):
    """Bounds of the waiting states, in seconds; ``None``: no bound."""

    start_s: float | None = 600.0  # --cluster-time-out
    grace_s: float = 30.0  # --shutdown-timeout: from asking workers to stop to SIGKILL
    kill_s: float = 30.0  # from SIGKILL to giving up on an unkillable worker
    scheduler_s: float | None = None  # --scheduler-grace: how long the cluster lets msrun exit
    exit_s: float = 30.0  # --grace: from a signal that asks for a stop until the step is saved
    asked_exit_s: float = 600.0  # the same for other requests: nobody kills msrun after them
    hang_s: float | None = None  # --hang-timeout; None: from the ranks' own pace; 0: no detection


class LogSpec(NamedTuple):
    """Where output goes. Ranks are local ranks, but for ``tail`` (global ranks)."""

    log_dir: Path | None = None  # None: under the run's record in the state folder
    disabled: bool = False  # --log-dir /dev/null: no files, workers write to the console
    redirects: Mapping[int, Std] = {}  # empty: no -r given
    tee: Mapping[int, Std] = {}  # empty: no -t given
    local_ranks_filter: frozenset[int] | None = None  # console shows only these; None: all
    tail: frozenset[int] | None = None  # --tail-worker-log, console shows only these; None: all
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    worker_log_name: str = "worker"  # {ip} and {hostname} already filled in
    prefix_template: str | None = None  # ${role_name} ${rank} ${local_rank}

    @property
    def torchrun_tree(self) -> bool:
        """Whether ``-r``/``-t`` ask for torchrun's folder tree."""
        return not self.disabled and bool(self.redirects or self.tee)


class CopyMode(Enum):
    """``--protect-memory``: when the state is copied to msrun's memory while training goes on."""

    AUTO = "auto"  # where no other rank holds what one has; memory is read where that is cheap
    COPY = "copy"  # always
    LIVE = "live"  # always; and the memory of killed ranks is read
    OFF = "off"


class ProtectMode(Enum):
    """``--protect``: what keeps the state of the ranks."""

    HOOKS = "hooks"  # the TrainState of a script that has one
    SHADOW = "shadow"  # copies of the processes; the script needs nothing
    AUTO = "auto"  # hooks of a script that has a TrainState, copies of any other
    OFF = "off"  # nothing


class DumpSpec(NamedTuple):
    """How a dump is made and what a run resumes from. Times in seconds.

    ``agent.spec.timeouts`` derives the times from what the user gave.
    """

    audit: float = AUDIT_SHARE  # --audit: of the training's time
    update_grace_s: float = 10.0  # --update-grace: for an optimizer update in progress
    freeze_s: float = 5.0  # --freeze-timeout: until ranks outside an update report to be frozen
    stall_s: float = 20.0  # --dump-timeout: without a byte of progress
    split: bool = False  # --dump-split: all survivors write a part each
    fallback: Path | None = None  # --dump-fallback; None: dumps/ in the log folder
    keep: int = 3  # --keep-dumps: of this run and those that it resumed; 0: all
    resume: Path | None = None  # the verified checkpoint folder that attempt 0 resumes from
    resume_step: int = 0  # what it holds
    lineage: tuple[str, ...] = ()  # record ids of the runs that this one resumes, newest first
    recover_arg: str | None = None  # appended at a resume; empty: nothing; None: not decided yet
    is_strict: bool = False  # --strict: refuse a script with variables that cannot be restored
    restarts_explicit: bool = False  # whether --max-restarts was given, in whatever way
    after_failure: bool = True  # --on-failure allows a dump; a graceful exit is saved in any case
    ttp: bool = True  # MS_ENABLE_TFT='{TTP:0}' switches the feature off
    places: int = 2  # folders to try: the script's and the fallback
    copies: CopyMode = CopyMode.AUTO  # --protect-memory: of the state, while training goes on
    copy_every: int = 0  # --protect-every: steps; 0: as often as costs 1 % of the training's time
    # all ranks restart from what is in memory at once, while it goes to the disk: on one node
    restarts_from_memory: bool = False
    memory_writers: int = 8  # at most: a core touches 2 GB of memory a second, a GPU has its link

    @property
    def answer_s(self) -> float:
        """Until every rank says what it holds, the grace for its update included."""
        return self.freeze_s + self.update_grace_s


class ReplaceSpec(NamedTuple):
    """Whether only lost ranks are started again while the others stay alive."""

    is_on: bool = True  # --on-failure, MS_ENABLE_TFT='{ARF:0}'
    why_off: str = ""  # as text, if it is not on
    max_replacements: int = 20  # --max-replacements within the period; a lost node is one
    period_s: float = 3600.0  # --replacement-period
    deaths: int = 3  # of one rank at one step: after so many it is not replaced any more
    failures: int = 2  # the same of the script's own, in a row at one step: likewise
    near: range = range(0)  # ranks on the controller's node, which write memory first
    has_nodes: bool = False  # there are several
    nodes: tuple[int, ...] = ()  # the workers of each, by their ranks; none: one node
    node_wait_s: float = 0.0  # --node-wait: for another node in the place of a lost one
    rejoin_s: float = 30.0  # for survivors to leave the training function
    join_s: float = 600.0  # for all to be in the new process group, newcomers too


class Policy(NamedTuple):
    """What the user asked for, as far as the controller's decisions need it."""

    ranks: tuple[int, ...]
    max_restarts: int
    timeouts: Timeouts = Timeouts()
    dump: DumpSpec = DumpSpec()
    replace: ReplaceSpec = ReplaceSpec()
    stalls: int = 3  # attempts in a row without a new commit end the job


class BindSpec(NamedTuple):
    """The requested CPU binding; ``agent.launch.cpu_binding`` resolves it."""

    auto: bool = False  # --bind-core=True: an even, NUMA-aware share of the cores
    cores: Mapping[int, tuple[str, ...]] = {}  # {0: ("0-3", "8")}
    numa: str | None = None  # node | socket | exclusive | core-complex

    @property
    def wanted(self) -> bool:
        """Whether any binding is requested."""
        return self.auto or bool(self.cores) or self.numa is not None


class NotifySpec(NamedTuple):
    """What programs outside of the job are told."""

    on_event: tuple[str, ...] = ()  # --on_event: the words of a command
    webhook: str = ""  # --webhook: an address, perhaps with a password
    metrics_file: Path | None = None  # absolute
    metrics_port: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is anything to tell, or anyone."""
        return bool(self.on_event or self.webhook or self.metrics_file or self.metrics_port)


class HandSpec(NamedTuple):
    """A job whose processes are started one by one: a controller, and one msrun a worker."""

    has_worker: bool  # this is no controller, and never becomes one before that is lost
    name: str = ""  # of the worker, whose order gives the ranks; empty: it has none


class ClusterSpec(NamedTuple):
    """Several nodes that are to run a job together."""

    nnodes: int
    world: int | None = None  # workers of all nodes, where that decides who is missing
    node_rank: int = -1  # of this node; -1: not given
    token_file: Path | None = None  # holds what proves that a node belongs to the job
    has_sparse_ranks: bool = False  # of node ranks only the order counts, numbers may be left out
    is_spare: bool = False  # this node wants no place before another one is lost
    least: int = 0  # nodes with which the job begins if no more come; 0: all of them
    last_call_s: float = 30.0  # that so many wait for more
    tls_config: Path | None = None  # --tls-config; None: what the nodes say is not encrypted
    token_variable: str = ""  # of the environment: holds it, too
    own_token: str = ""  # names the one that the nodes make if none is given; empty: they make none
    said: tuple[str, ...] = ()  # sentences for the first line, as what several nodes do without
    lost_at: tuple[int, ...] = ()  # the steps after which the job has lost node 0
    seeks_newer: bool = False  # another node may have a later step of the run that is resumed
    home: tuple[str, int] | None = None  # where its nodes met first, if that was elsewhere
    by_hand: HandSpec | None = None
    resumes: bool = False  # --resume was given here, and node 0 is to find the checkpoint
    store: tuple[tuple[str, int], ...] = ()  # --controller-store: members; none: there is none
    silence_s: float = 10.0  # --node-timeout: after which a node counts as lost
    leaves: bool = False  # --on-leave=shrink: whoever ends this node's msrun means this node alone
    place: int = -1  # among nodes without a rank, as their engine has numbered them; -1: not known


class AdoptedJob(NamedTuple):
    """A job whose ranks train already: they have lost their controller, and go on with this one."""

    job_id: str  # by which its checkpoints are known
    attempt: int  # that the ranks are in
    resume: Path | None = None  # the checkpoint that they have resumed from
    resume_step: int = 0  # that it holds
    near: range = range(0)  # ranks on the node of this msrun, which has taken node 0's part


class JobSpec(NamedTuple):
    """A checked job: what to run, how many times, where, and what to do when it breaks."""

    program: Program
    nproc: int  # workers on this node
    run_id: str  # TORCHELASTIC_RUN_ID
    record_id: str  # unique name of this run on this host
    job_id: str = ""  # the same of the controller's node, if that is another one
    adopted: AdoptedJob | None = None  # None: its ranks are started
    engine_job: str = ""  # names the job of the batch system that has started this one
    argv: tuple[str, ...] = ()  # the arguments of msrun that start this job again
    is_away: bool = False  # --resume changed into the run's folder from another one
    cluster: ClusterSpec | None = None  # who takes part; None: this node alone
    nodes: tuple[int, ...] = ()  # the workers of each node, once all have joined
    node_rank: int = 0
    spent: SpentBudget = SpentBudget()  # of its budgets, before this run of it began
    local_first: int = 0  # the first local rank here, if other nodes are on the same machine
    local_world: int = 0  # workers on this machine; 0: those of this node
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: a free port is taken
    max_restarts: int = 0
    start_method: StartMethod = StartMethod.AUTO
    protect: ProtectMode = ProtectMode.HOOKS
    preload: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    graceful_signals: tuple[int, ...] = ()  # --graceful-signals
    exit_file: Path | None = None  # --graceful-exit-file, absolute
    logs: LogSpec = LogSpec()
    bind: BindSpec = BindSpec()
    dump: DumpSpec = DumpSpec()
    replace: ReplaceSpec = ReplaceSpec()
    notify: NotifySpec = NotifySpec()
    virtual_local_rank: bool = False
    devices: DevicePlan = DevicePlan()  # --spare-devices
    rank_table_file: str | None = None
    event_log_handler: str = "null"  # null | console

    @property
    def silence_s(self) -> float:
        """After how many seconds without a word another node counts as lost."""
        return ClusterSpec(1).silence_s if self.cluster is None else self.cluster.silence_s

    @property
    def policy(self) -> Policy:
        """The part that decides."""
        ranks, replace = tuple(range(self.world_size)), self.replace
        if self.nnodes > 1:
            ranks_near = self.ranks_near
            here = range(ranks_near[0], ranks_near[-1] + 1) if ranks_near else range(0)
            replace = replace._replace(near=here, has_nodes=True, nodes=self.nodes)
        dump = self.dump._replace(restarts_from_memory=self.nnodes == 1)
        return Policy(ranks, self.max_restarts, self.timeouts, dump, replace)

    @property
    def shadows(self) -> str:
        """Optimizer steps from one shadow to the next, or ``measured``; empty: there are none."""
        is_wanted = self.protect in {ProtectMode.SHADOW, ProtectMode.AUTO}
        return str(self.dump.copy_every or "measured") if is_wanted else ""

    @property
    def nnodes(self) -> int:
        """The nodes that have joined."""
        return len(self.nodes) or 1

    @property
    def world_size(self) -> int:
        """All workers of the job."""
        return sum(self.nodes) or self.nproc

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        return sum(self.nodes[: self.node_rank])

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return tuple(range(self.first_rank, self.first_rank + self.nproc))

    @property
    def ranks_near(self) -> tuple[int, ...]:
        """The ranks that are lost with the node of this msrun, which may decide without having any.

        If it has taken the part of a node 0, it reaches those of its node as it does all others.
        """
        return tuple(self.adopted.near) if self.adopted and self.adopted.near else self.ranks_here

    @property
    def local_world_size(self) -> int:
        """The workers on this machine."""
        return self.local_world or self.nproc

    @property
    def group_rank(self) -> int:
        """The place of this node among those that have workers."""
        return sum(nproc > 0 for nproc in self.nodes[: self.node_rank])

    @property
    def group_world_size(self) -> int:
        """The nodes that have workers."""
        return sum(nproc > 0 for nproc in self.nodes) or 1

    @property
    def given_id(self) -> str:
        """The id that was asked for; empty: it has that of its record."""
        return "" if self.run_id == self.record_id else self.run_id

    @property
    def home(self) -> tuple[str, int]:
        """Where its nodes met first, or are to."""
        assert self.cluster is not None
        assert self.master_port is not None
        return self.cluster.home or (self.master_addr, self.master_port)

    @property
    def saves_as(self) -> str:
        """The id by which checkpoints of this job are known, on all nodes."""
        return self.job_id or (self.adopted.job_id if self.adopted else self.record_id)

    @property
    def is_controlled(self) -> bool:
        """Whether the controller is on another node."""
        return bool(self.job_id)
