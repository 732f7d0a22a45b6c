"""The environment of a worker; the only place that spells the variables' names.

The first block is torchrun's contract (torch 2.13, ``local_elastic_agent``), the second is
MindSpore's, so a script that reads either set works. Pure: mappings in, mappings out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

RUNS = "MSRUN_RUNS"
"""Ids of the msrun runs a process belongs to, outermost first, joined by ``:``.

By it a process that left its worker's session and tree is still recognized as one of the run."""

JOB = "MSRUN_JOB"
"""Id by which checkpoints of a job on several nodes are known, if it is not the last of MSRUN_RUNS:
that of the run on the controller's node."""

HOOKS = "MSRUN_HOOKS"
"""Name of the agent's socket for hooks, in Linux's abstract namespace (without the leading NUL)."""

TOKEN, SERVER_PASSWORD, CLIENT_PASSWORD = (
    "MSRUN_TOKEN",
    "MSRUN_SERVER_PASSWORD",
    "MSRUN_CLIENT_PASSWORD",
)
"""They open the lines between the nodes of a job; msrun reads them, ranks do not have them."""

DRILL = "MSRUN_DRILL"
"""JSON: the faults that a drill injects, and where ranks record what they computed."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch reads it: no rank hosts the store
AUDIT = "MSRUN_AUDIT"
"""Share of the training's time in which ranks look whether tensors change unseen; 0: never."""

AUDIT_SHARE = 0.005
STRICT = "MSRUN_STRICT"
"""``1``: a script does not train if some of its variables cannot be restored."""

SHADOWS = "MSRUN_SHADOWS"
"""Optimizer steps from one shadow of the rank to the next, or ``measured``: as few as cost little.

Not set: it makes none.
"""

KEEPS_MEMORY = "MSRUN_KEEPS_MEMORY"
"""``live``, or ``auto``: a rank's memory is kept when it is killed, and it notes where its state
lies; with ``auto`` as long as that is cheap, for all ranks."""

FORKSERVER_PID = "MSRUN_FORKSERVER_PID"
"""The process that started the rank. If msrun is killed it lives until all ranks have saved."""

REHEARSE = "MSRUN_REHEARSE"
"""``1``: a new rank whose peers live on; its groups only pretend until it calls ``run``."""

GROUP_INFO_FILE = "GROUP_INFO_FILE"
"""MindSpore's: where a rank writes which ranks hold the same state."""

ENABLE_TFT = "MS_ENABLE_TFT"
"""MindSpore's switches of fault tolerance.

``{ARF:0}`` switches off the replacement of lost ranks; ``{TTP:0}`` also the power-off checkpoint.
"""

_TFT_FORM = "must be like {TTP:1,UCE:0}: names with 1 or 0"
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}

PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
AGENT_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
PYTHON_EXEC = "PYTHON_EXEC"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
OVERRULING_DEVICES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # on ROCm
SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NCCL_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_TRUE = frozenset({"1", "true", "y", "yes", "t"})  # as torch reads its switches
_NCCL_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_NCCL_WATCHING = {  # with these torch switches its watchdog on again
    "TORCH_NCCL_DESYNC_DEBUG": _TRUE,
    "TORCH_DISTRIBUTED_DEBUG": frozenset({"detail"}),
}


class JobEnv(NamedTuple):
    """The part of the environment that is the same for all workers and attempts of a job."""

    run_id: str
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    role: str
    master_addr: str
    master_port: int
    max_restarts: int
    signals: tuple[str, ...]
    rank_table_file: str | None = None
    hooks: str = ""
    """Name of the agent's socket for hooks; empty: a dry run."""
    audit: float = AUDIT_SHARE
    is_strict: bool = False
    job_id: str = ""
    """The controller's record id, if that is on another node."""
    interface: str = ""
    """The network interface at which other nodes are reached; empty: there are none."""
    shadows: str = ""
    """Optimizer steps from one shadow to the next, or ``measured``; empty: there are none."""
    keeps_memory: str = ""
    """``live``: the memory of killed ranks is read; ``auto``: if that is cheap; empty: not."""

    def environ(self, inherited: Mapping[str, str], record_id: str) -> dict[str, str]:
        """Variables that are the same on all ranks; ``inherited`` is the agent's environment."""
        environ = {
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
            "ROLE_NAME": self.role,
            "ROLE_WORLD_SIZE": str(self.world_size),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            AGENT_STORE: str(True),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(self.signals),
            NCCL_ASYNC_ERRORS: inherited.get(NCCL_ASYNC_ERRORS, "1"),
            AUDIT: f"{self.audit:g}",
            RUNS: ":".join(filter(None, (inherited.get(RUNS), record_id))),
            "MS_ROLE": "MS_WORKER",
            "MS_WORKER_NUM": str(self.world_size),
            "MS_SCHED_HOST": self.master_addr,
            "MS_SCHED_PORT": str(self.master_port),
            "MS_NODE_RANK": str(self.group_rank),
            "RANK_SIZE": str(self.world_size),
        }
        if self.hooks:
            environ[HOOKS] = self.hooks
        elif HOOKS in inherited:  # of another msrun
            environ[HOOKS] = ""
        if self.job_id or JOB in inherited:
            environ[JOB] = self.job_id
        for name in SOCKET_INTERFACES if self.interface else ():
            environ[name] = inherited.get(name, self.interface)
        if self.is_strict:
            environ[STRICT] = "1"
        if self.hooks and self.shadows:
            environ[SHADOWS] = self.shadows
        if self.hooks and self.keeps_memory:
            environ[KEEPS_MEMORY] = self.keeps_memory
        if self.rank_table_file is not None:
            environ["RANK_TABLE_FILE"] = self.rank_table_file
        if sets_omp_threads(self.local_world_size, inherited):
            environ[OMP_NUM_THREADS] = "1"
        return environ


class WorkerEnv(NamedTuple):
    """The part of the environment that belongs to one worker of one attempt."""

    rank: int
    local_rank: int
    restart_count: int
    error_file: str
    visible_device: str | None = None
    """With ``--virtual-local-rank``: the one device this worker sees (LOCAL_RANK is then 0)."""
    devices: tuple[str, ...] = ()
    """The devices this worker sees, if they are not those that it inherits."""

    def environ(self) -> dict[str, str]:
        """Variables that differ between ranks or attempts."""
        shown_local_rank = self.local_rank if self.visible_device is None else 0
        environ = {
            "RANK": str(self.rank),
            "ROLE_RANK": str(self.rank),
            "LOCAL_RANK": str(shown_local_rank),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_ERROR_FILE": self.error_file,
            "MS_NODE_ID": str(self.rank),
            "RANK_ID": str(self.rank),
            "DEVICE_ID": str(shown_local_rank),
        }
        if self.visible_device is not None:
            environ[CUDA_VISIBLE_DEVICES] = self.visible_device
        elif self.devices:
            environ[CUDA_VISIBLE_DEVICES] = ",".join(self.devices)
        return environ


class RankEnv(NamedTuple):
    """What a training process reads from its environment."""

    rank: int
    world_size: int
    attempt: int
    record_id: str  # empty: no msrun
    hooks: str  # the agent's socket; empty: nobody guards this process
    drill: str  # empty: no drill
    local_world_size: int = 1  # ranks on this host
    nodes: int = 1  # msrun processes that have ranks of the job
    audit: float = AUDIT_SHARE  # of the time
    is_strict: bool = False  # refuse to train with variables that cannot be restored
    save_to: str = ""  # a drill's folder; it replaces every folder that the script saves to
    is_controlled: bool = False  # by msrun on another node
    keeps_memory: str = ""  # of killed ranks, to be read: ``live``, or ``auto``: if it is cheap
    forkserver: int = 0  # the process that lives until all have saved, if msrun is killed

    def redirected(self, folder: str) -> str:
        """Where to save instead of in ``folder``; there itself, unless this is a drill."""
        return self.save_to or folder

    @staticmethod
    def read(environ: Mapping[str, str]) -> RankEnv:
        """Read the environment; without a launcher: one rank of one."""

        def number(name: str, default: int) -> int:
            try:
                return int(environ.get(name, default))
            except ValueError:
                return default

        return RankEnv(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
            record_id=environ.get(JOB) or environ.get(RUNS, "").rpartition(":")[2],
            hooks=environ.get(HOOKS, ""),
            drill=environ.get(DRILL, ""),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            nodes=number("GROUP_WORLD_SIZE", 1),
            audit=_share(environ.get(AUDIT, "")),
            is_strict=environ.get(STRICT) == "1",
            is_controlled=bool(environ.get(JOB)),
            keeps_memory=environ.get(KEEPS_MEMORY, ""),
            forkserver=number(FORKSERVER_PID, 0),
        )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        return AUDIT_SHARE
    return share if 0 <= share <= 1 else AUDIT_SHARE


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of the store at which the ranks meet."""
    port = environ.get("MASTER_PORT", "")
    return environ.get("MASTER_ADDR", ""), int(port) if port.isdecimal() else 0


def shadows_socket(hooks: str) -> str:
    """The agent's socket for shadows; ``hooks``: that for hooks."""
    return f"{hooks}-shadows"


def rejoined(attempt: int, port: int, host: str = "") -> dict[str, str]:
    """The variables that change for a process that stays alive in a later attempt.

    Args:
        attempt: that later one.
        port: of the store at which the ranks meet; 0: the same as before.
        host: on which machine that is; empty: the same as before.
    """
    return {"TORCHELASTIC_RESTART_COUNT": str(attempt), **met_at(port, host)}


def met_at(port: int, host: str) -> dict[str, str]:
    """The variables that name where the ranks meet, as far as that is another place."""
    changed = {"MASTER_PORT": str(port), "MS_SCHED_PORT": str(port)} if port else {}
    return changed | ({"MASTER_ADDR": host, "MS_SCHED_HOST": host} if host else {})


def without_nccl_watchdog(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable to change so that torch's watchdog of NCCL does not act on the death of a peer.

    As torchrun starts it, the watchdog aborts the communicators of a survivor and ends it, which
    may be before its state is copied. msrun notices deaths and hangs of a guarded training itself;
    a script that is not guarded, or a user who chose otherwise, keeps it.
    """
    try:
        is_guarded = tft_features(environ.get(ENABLE_TFT, "")).get("TTP", True)
    except ValueError:  # said when training begins
        return {}
    is_default = environ.get(NCCL_ASYNC_ERRORS) == "1"
    return {NCCL_ASYNC_ERRORS: "0"} if environ.get(HOOKS) and is_guarded and is_default else {}


def why_nccl_watchdog(environ: Mapping[str, str]) -> str:
    """Why that watchdog acts nevertheless, and what helps, as text; empty: it does not."""
    if environ.get(_NCCL_BLOCKING, "").lower() in _TRUE:  # the main thread waits instead
        return ""
    handling = environ.get(NCCL_ASYNC_ERRORS, "unset")
    if handling == "1":
        return "NCCL's group was made before TrainState was imported; import it first"
    if handling != "0":
        return f"{NCCL_ASYNC_ERRORS} is {handling}; set it to 0"
    for name, values in _NCCL_WATCHING.items():
        if environ.get(name, "").lower() in values:
            return f"{name} is {environ[name]}; unset it"
    return ""


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what opens the job's lines between nodes: no rank needs that."""
    keys = (TOKEN, SERVER_PASSWORD, CLIENT_PASSWORD)  # and the files that hold them
    return {name: text for name, text in environ.items() if not name.startswith(keys)}


def sets_omp_threads(local_world_size: int, inherited: Mapping[str, str]) -> bool:
    """Whether OMP_NUM_THREADS=1 is exported, by torchrun's rule: many workers and unset."""
    return local_world_size > 1 and OMP_NUM_THREADS not in inherited


def listed_devices(inherited: Mapping[str, str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES lists; empty: it is not set, or lists none."""
    listed = inherited.get(CUDA_VISIBLE_DEVICES)
    return tuple(device.strip() for device in listed.split(",")) if listed else ()


def visible_devices(local_world_size: int, inherited: Mapping[str, str]) -> tuple[str, ...]:
    """The device each local rank sees under ``--virtual-local-rank``.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES lists fewer devices than there are workers.
    """
    devices = listed_devices(inherited)
    if not devices:
        return tuple(str(rank) for rank in range(local_world_size))
    if len(devices) < local_world_size:
        message = (
            f"--virtual-local-rank needs one device a worker: CUDA_VISIBLE_DEVICES="
            f"{inherited[CUDA_VISIBLE_DEVICES]} lists {len(devices)} for {local_world_size} workers"
        )
        raise ValueError(message)
    return devices[:local_world_size]


def tft_features(text: str) -> dict[str, bool]:
    """What MindSpore's ``MS_ENABLE_TFT`` switches on and off, by name: ``{TTP:1, UCE:0}``.

    Spaces, quotes and case do not matter; an empty text switches nothing.

    Raises:
        ValueError: it has another form.
    """
    bare = "".join(char for char in text if char not in " \t\r\n'\"")
    if not bare:
        return {}
    if not (bare.startswith("{") and bare.endswith("}")):
        raise ValueError(_TFT_FORM)
    features = {}
    items = bare[1:-1].removesuffix(",")
    for item in items.split(",") if items else ():
        name, _, switch = item.partition(":")
        if not name.isidentifier() or switch.lower() not in _SWITCHES:
            raise ValueError(_TFT_FORM)
        features[name.upper()] = _SWITCHES[switch.lower()]
    return features
