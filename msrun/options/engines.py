"""What Slurm, Open MPI and Kubernetes tell their processes: values of options that nobody gave.

An engine starts one msrun a node, or with Open MPI also one a rank; then the first of each node
takes them all. A person who sets MindSpore's variables starts one a worker. Sources: srun(1)
"OUTPUT ENVIRONMENT VARIABLES", Open MPI's FAQ "Running MPI jobs", the Kubernetes manual "Indexed
Job", and what Slurm 22.05 and Open MPI 4.1 were seen to set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from agent.spec.job_spec import HandSpec, UsageError
from msrun.options.settings import Setting, Settings, truth

_LOWEST_PORT, _PORTS = 20_000, 12_000  # below those that Linux hands out by itself
_STEPS_A_JOB = 64  # that have ports of their own
_PSEUDO_STEP = 0xFFFF_FF00  # a batch script's step, an interactive one: not srun's
_SCHEDULER, _WORKER = "MS_SCHED", "MS_WORKER"
_SIZES = ("worker_num", "local_worker_num", "nproc_per_node")
_PLACES = ("master_addr", "rdzv_endpoint")
_UNNAMED = re.compile(r"[^\w.-]")
_PRTERUN = re.compile(r"prterun-([\w.-]+)-\d+@\d+$")
_BRACKET = re.compile(r"\[([^],-]*)[^]]*\]")


class Engine(NamedTuple):
    """What started this msrun beside others."""

    name: str  # for people
    nnodes: int
    given: Mapping[str, Setting]  # of options, by dest, named after the engine's variables
    token_variable: str = ""  # holds a secret that all nodes of the job have
    start: str = ""  # names this start of the job, where its nodes can make a secret of their own
    slurm_job: str = ""  # its number, if Slurm may end it for another one
    job: str = ""  # names the engine's job, whenever it is started
    is_requeued: bool = False  # it was started before
    has_sparse_ranks: bool = False  # its node ranks are numbers of ranks, of each node's first
    team: str = ""  # names the msruns of this node, of which one takes the ranks of all
    followers: int = 0  # of that one
    is_follower: bool = False
    by_hand: HandSpec | None = None
    spares: int = 0  # nodes beyond those that are asked for
    place: int = -1  # this node's number, where who is node 0 is not the engine's word; -1: none

    @property
    def said(self) -> str:
        """The sentence for those who wonder why several nodes take part; empty: there is one."""
        if self.by_hand is not None:
            return f"{self.name}: this process controls the job, and runs none of its workers"
        if self.nnodes == 1:
            return ""
        if self.spares:
            be = "one waits as a spare" if self.spares == 1 else f"{self.spares} wait as spares"
            return f"{self.name}: the job is on {self.nnodes} nodes, {be}"
        return f"{self.name}: the job is on {self.nnodes} nodes (--nnodes=1 runs each by itself)"


def engine(environ: Mapping[str, str], settings: Settings) -> Engine | None:
    """What started this process, as far as no option says otherwise.

    ``settings``: what was given; only what is not comes from the engine.

    Raises:
        UsageError: the engine started msrun in a way that makes no job.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None  # a rank starts a job of its own
    if "standalone" in settings.given and truth(settings.given["standalone"]):
        return None
    for read in (_mindspore, _open_mpi, _slurm, _kubernetes):
        found = read(environ, settings)
        if found is not None:
            if found.by_hand is not None:
                return found
            return None if _is_alone(settings, found) else _filled(found, settings)
    return None


def _is_alone(settings: Settings, found: Engine) -> bool:
    """Whether another number of nodes is asked for: then each task is a job of its own."""
    wanted = _wanted(settings)
    return wanted is not None and (wanted.most <= 1 or wanted.least > found.nnodes)


class _Range(NamedTuple):
    """How many nodes are asked for; 0: what is given is no number."""

    least: int
    most: int


def _wanted(settings: Settings) -> _Range | None:
    """The nodes that are asked for; ``None``: nobody says."""
    if "nnodes" not in settings.given:
        return None
    low, _, high = settings.given["nnodes"].text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal()):
        return _Range(0, 0)
    return _Range(int(low), int(high))


def _filled(found: Engine, settings: Settings) -> Engine:
    """With values for those options alone that nobody gave."""
    hidden = set(settings.given)
    if hidden & set(_PLACES):  # another place than the engine's
        hidden |= {"master_addr", "master_port"}
        if "master_addr" in found.given:  # its owner is node 0, whatever its number here
            hidden.add("node_rank")
    if hidden & set(_SIZES) and not found.team:
        hidden |= set(_SIZES)
    if found.team and "nnodes" in hidden:  # then nodes are numbered from 0 without a gap
        hidden.add("node_rank")
    asked, place = _wanted(settings), found.given.get("node_rank")
    wanted = 0 if asked is None else asked.most
    spares = {}
    if "spare_node" in settings.given:
        hidden.add("node_rank")
    elif wanted and wanted < found.nnodes and place is not None and not found.team:
        if int(place.text) >= wanted and "node_rank" not in settings.given:
            hidden.add("node_rank")
            spares = {"spare_node": Setting("True", place.name)}
        found = found._replace(nnodes=wanted, spares=found.nnodes - wanted)
    if {"worker_num", "local_worker_num"} <= settings.given.keys():  # of nodes in all
        hidden.add("nnodes")
    given = {dest: each for dest, each in found.given.items() if dest not in hidden} | spares
    is_ranked = {"node_rank", "spare_node"} & (given.keys() | settings.given.keys())
    if place is not None and not is_ranked:
        found = found._replace(place=int(place.text))
    return found._replace(given=given)


def _settings(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Setting]:
    """Options whose values stand in variables; ``names`` by dest."""
    return {dest: Setting(environ[name], name) for dest, name in names.items() if environ.get(name)}


def _numbers(environ: Mapping[str, str], names: Iterable[str]) -> list[int] | None:
    """The variables' values; ``None``: not all are whole numbers."""
    texts = [environ.get(name, "") for name in names]
    return [int(text) for text in texts] if all(text.isdecimal() for text in texts) else None


# --- by hand --------------------------------------------------------------------------------------


def _mindspore(environ: Mapping[str, str], settings: Settings) -> Engine | None:
    """MindSpore's dynamic cluster: a scheduler, and each worker, is started by itself.

    Source: MindSpore's manual "Dynamic Cluster Startup".
    """
    role = environ.get("MS_ROLE", "")
    if not role or {"nnodes", "node_rank", "spare_node", *_SIZES, *_PLACES} & settings.given.keys():
        return None  # options say how many, and where
    if role not in {_SCHEDULER, _WORKER}:
        raise UsageError(f"MS_ROLE={role} must be {_SCHEDULER} or {_WORKER}")
    named = {
        "worker_num": "MS_WORKER_NUM",
        "master_addr": "MS_SCHED_HOST",
        "master_port": "MS_SCHED_PORT",
    }
    given = _settings(environ, named)
    if lacking := [name for dest, name in named.items() if dest not in given]:
        raise UsageError(f"MS_ROLE={role} needs {' and '.join(lacking)}, too")
    given["local_worker_num"] = Setting("1", "MS_ROLE")
    name = environ.get("MS_NODE_ID", "") if role == _WORKER else ""
    by_hand = HandSpec(role == _WORKER, name)
    return Engine(f"MS_ROLE={role}", 1, given, by_hand=by_hand)


# --- Slurm ----------------------------------------------------------------------------------------


def _slurm(environ: Mapping[str, str], settings: Settings) -> Engine | None:
    """A task of ``srun``; a batch script without it is one process, as anywhere else."""
    names = ("JOB_ID", "STEP_ID", "STEP_NUM_NODES", "STEP_NUM_TASKS")
    numbers = _numbers(environ, (f"SLURM_{name}" for name in names))
    if numbers is None or numbers[1] >= _PSEUDO_STEP:
        return None
    job, step, nnodes, tasks = numbers
    if nnodes == 1 and tasks > 1 and set(_SIZES) & settings.given.keys():
        return None  # typed by hand within a step of many tasks
    given = {"rdzv_id": Setting(f"slurm-{job}.{step}", "SLURM_STEP_ID")}
    if nnodes > 1:
        named = {"nnodes": "SLURM_STEP_NUM_NODES", "node_rank": "SLURM_NODEID"}
        given |= _settings(environ, named | {"nproc_per_node": "SLURM_GPUS_ON_NODE"})
        port = _LOWEST_PORT + (job * _STEPS_A_JOB + step) % _PORTS
        given["master_port"] = Setting(str(port), "SLURM_JOB_ID")
        if host := first_host(environ.get("SLURM_STEP_NODELIST", "")):
            given["master_addr"] = Setting(host, "SLURM_STEP_NODELIST")
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    start = "-".join(filter(None, ("slurm", cluster, f"{job}.{step}", restarts)))
    found = Engine(
        f"Slurm's step {job}.{step}",
        nnodes,
        given,
        start=_UNNAMED.sub("_", start),
        slurm_job=str(job),
        job=f"Slurm {cluster} {job}",
        is_requeued=bool(restarts.strip("0")),
    )
    if tasks != nnodes and not _is_alone(settings, found):
        where = "1 node" if nnodes == 1 else f"{nnodes} nodes"
        raise UsageError(
            f"this step of Slurm has {tasks} tasks on {where}, but msrun is to be started once a "
            "node: srun --ntasks-per-node=1, and --nproc-per-node says how many ranks a node has; "
            "with --nnodes=1 each task is a job of its own"
        )
    return found


def first_host(nodelist: str) -> str:
    """The first name of Slurm's list: ``n0`` of ``n[0-2,5],gpu[08-11]``; empty if there is none."""
    outside = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(",", ";"), nodelist)
    return _BRACKET.sub(r"\1", outside.partition(",")[0].replace(";", ","))


# --- Open MPI -------------------------------------------------------------------------------------


def _open_mpi(environ: Mapping[str, str], settings: Settings) -> Engine | None:
    """A process of ``mpirun``: the only one of its node, or one for each rank."""
    names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    numbers = _numbers(environ, (f"OMPI_COMM_WORLD_{name}" for name in names))
    if numbers is None or numbers[0] == 1:
        return None
    size, rank, local_size, local_rank = numbers
    told = environ.get("OMPI_MCA_orte_num_nodes", "")
    nnodes = int(told) if told.isdecimal() else -(-size // local_size)
    is_team = size > nnodes  # its ranks are ours
    if not told.isdecimal() and size != local_size:  # Open MPI 5; other nodes may have more ranks
        is_team = local_size > 1 or not set(_SIZES) & settings.given.keys()
    space = environ.get("PMIX_NAMESPACE", "0")
    named = {"node_rank": "OMPI_COMM_WORLD_RANK", "nnodes": "OMPI_COMM_WORLD_SIZE"}
    if is_team:
        named = {"worker_num": "OMPI_COMM_WORLD_SIZE"}
        if nnodes > 1:
            named |= {
                "node_rank": "OMPI_COMM_WORLD_RANK",
                "local_worker_num": "OMPI_COMM_WORLD_LOCAL_SIZE",
            }
    given = _settings(environ, named)
    if nnodes > 1:
        is_open = not set(_PLACES) & settings.given.keys()
        given |= _place(environ, space, is_first=rank == 0)
        if is_open and (found := _host_of_prterun(environ, space, is_first=rank == 0)):
            given["master_addr"] = found
        if rank == 0 and "master_addr" not in given and is_open:
            raise UsageError(
                "mpirun does not tell at which address the nodes meet, as it does where its own "
                "machine has ranks: name the first of its hosts, as in "
                "--master-addr=HOST"
            )
    return Engine(
        f"Open MPI's job {space}",
        nnodes,
        given,
        token_variable="OMPI_MCA_orte_precondition_transports",  # noqa: S106  a name
        has_sparse_ranks=is_team,
        team=space if is_team else "",
        followers=local_size - 1 if is_team else 0,
        is_follower=is_team and local_rank > 0,
    )


def _place(environ: Mapping[str, str], space: str, *, is_first: bool) -> dict[str, Setting]:
    """Where mpirun itself is, which all processes are told: by its rules it is rank 0's node."""
    name, own = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
    found = re.search(r"tcp://([\w.,-]+)|tcp6://\[([^\]]+)", environ.get(name, ""))
    given = {}
    if found and not (is_first and environ.get(own, "") != environ[name]):
        addresses = (found[1] or found[2]).split(",")
        at = addresses[0] if is_first or len(addresses) == 1 else _nearest(addresses)
        given["master_addr"] = Setting(at, name)
    port = _LOWEST_PORT + crc32(space.encode()) % _PORTS
    given["master_port"] = Setting(str(port), "PMIX_NAMESPACE")
    return given


def _nearest(addresses: list[str]) -> str:
    """The first of another machine's addresses in a network of this one, else the first.

    It may have networks that this one does not see, and each may have a bridge of its own for
    containers, at one and the same address.
    """
    from ipaddress import ip_address, ip_interface  # rarely needed, as the other one

    import psutil

    def length(mask: str | None) -> int:
        return int(ip_address(mask or "")).bit_count()

    networks, own = [], set()
    for each in (one for found in psutil.net_if_addrs().values() for one in found):
        with suppress(ValueError):  # a card's own number, say
            there = ip_interface(f"{each.address.partition('%')[0]}/{length(each.netmask)}")
            networks.append(there.network)
            own.add(there.ip)
    others = []
    for text in addresses:
        with suppress(ValueError):
            if (address := ip_address(text)) not in own:
                others.append((not any(address in network for network in networks), text))
    # False comes first, and of those alike the one that came first
    return min(others, key=lambda each: each[0])[1] if others else addresses[0]


def _host_of_prterun(environ: Mapping[str, str], space: str, *, is_first: bool) -> Setting | None:
    """The host of Open MPI 5's mpirun, by the job's name; ``None``: it cannot be node 0."""
    found = _PRTERUN.match(space)
    if found is None or (is_first and environ.get("PMIX_HOSTNAME") != found[1]):
        return None
    return Setting(found[1], "PMIX_NAMESPACE")


# --- Kubernetes -----------------------------------------------------------------------------------


def _kubernetes(environ: Mapping[str, str], settings: Settings) -> Engine | None:
    """A pod of an indexed Job, where options say how many nodes there are; an old PyTorchJob's."""
    if (asked := _wanted(settings)) is not None:
        if asked.most <= 1:
            return None
        index = _numbers(environ, ("JOB_COMPLETION_INDEX",))
        if index is None:
            return None
        given = _settings(environ, {"node_rank": "JOB_COMPLETION_INDEX"})
        return Engine("Kubernetes' Job", max(asked.most, index[0] + 1), given)
    named = {"nnodes": "WORLD_SIZE", "node_rank": "RANK", "master_addr": "MASTER_ADDR"}
    given = _settings(environ, named | {"master_port": "MASTER_PORT"})
    numbers = _numbers(environ, ("WORLD_SIZE", "RANK"))
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ  # no rank itself
    if not is_pod or numbers is None or len(given) < len(named):
        return None
    return Engine("Kubernetes' PyTorchJob", numbers[0], given) if numbers[0] > 1 else None
