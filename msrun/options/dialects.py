"""Options that torchrun and MindSpore both have: one value, or an error that names both options.

How many workers on how many nodes, where they meet, which cores they get.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import BindSpec, ClusterSpec, HandSpec, UsageError
from msrun.options import rank_maps
from msrun.options.settings import Setting, Settings, bounded, truth
from msrun.options.table import BY_DEST, NUMA_MODES, PORT_MAX

WORKERS_MAX = 10_000
"""Workers on one node: more than any machine needs, fewer than would exhaust it."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1"})
_BACKENDS = ("static", "c10d", "msrun")
_PORTS = {"static": 29500, "c10d": 29400, "msrun": 29500}
"""At which nodes meet if no port is given, as torchrun's do."""

_ETCD_PORT = 2379
_MOST_LAST_CALL_S = 86_400.0
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>.*))?", re.DOTALL)


class JobSize(NamedTuple):
    """The number of nodes, and of workers on this one."""

    nnodes: int
    nproc: int
    world: int | None = None  # of workers on all nodes, if it is given
    least: int = 0  # nodes with which the job may begin; 0: all


class MasterAddress(NamedTuple):
    """Where the workers' store listens; port ``None``: a free one."""

    addr: str
    port: int | None


def disagreement(*settings: Setting) -> UsageError:
    """The error that names the settings that contradict each other."""
    names = " and ".join(setting.shown for setting in settings)
    return UsageError(f"{names} disagree: give one of them, or equal values")


def size(settings: Settings, environ: Mapping[str, str]) -> JobSize:
    """Nodes and workers from --nnodes, --nproc-per-node, --worker-num, --local-worker-num.

    Raises:
        UsageError: they contradict each other or are out of range.
    """
    (least, nnodes), total = _nnodes(settings.of("nnodes")), settings.integer("worker_num")
    local = _local(settings, environ)
    if total is None:
        return _checked(settings, JobSize(nnodes, local or 1, least=least % nnodes))
    whole = settings.of("worker_num")
    if least < nnodes:
        raise disagreement(whole, settings.of("nnodes"))
    if "nnodes" not in settings.given and "local_worker_num" in settings.given and local:
        if local > total:
            raise disagreement(whole, settings.of("local_worker_num"))
        # the other nodes may have more workers or fewer
        return _checked(settings, JobSize(-(-total // local), local, total))
    if local is None and total % nnodes == 0:
        local = total // nnodes
    if local is None or nnodes * local != total:
        given = ("nnodes", "nproc_per_node", "local_worker_num")
        raise disagreement(whole, *(settings.of(dest) for dest in given if dest in settings.given))
    return _checked(settings, JobSize(nnodes, local))


def cluster(
    settings: Settings, found: JobSize, by_hand: HandSpec | None = None
) -> ClusterSpec | None:
    """Who else takes part; ``None``: this node alone.

    ``by_hand``: its processes are started one by one.

    Raises:
        UsageError: the rank of this node is no rank of so many nodes.
    """
    spare, store = settings.of("spare_node"), _store(settings.of("controller_store"))
    leaves = settings.text("on_leave") == "shrink"
    if leaves and not found.least:
        shown, what = settings.of("on_leave").shown, "a job that may go on with fewer nodes"
        raise UsageError(f"{shown} is for {what}: give --nnodes=MIN:MAX")
    is_spare = truth(spare)
    if found.nnodes == 1 and by_hand is None:
        if is_spare:
            raise UsageError(f"{spare.shown} is for a job on several nodes: say on how many")
        return None
    if is_spare and "node_rank" in settings.given:
        shown = settings.given["node_rank"].shown
        raise UsageError(f"{spare.shown} waits for any place: leave out {shown}")
    rank = -1 if by_hand is None or by_hand.has_worker else 0
    if "node_rank" in settings.given and (given := settings.integer("node_rank")) is not None:
        rank = given
    if rank >= found.nnodes and found.world is None:
        shown = settings.of("node_rank").shown
        raise UsageError(f"{shown}: the ranks of {found.nnodes} nodes are 0 to {found.nnodes - 1}")
    token = _file(settings.of("token_file"))
    last_call_s = _last_call_s(settings.of("rdzv_conf"))
    return ClusterSpec(
        found.nnodes,
        found.world,
        rank,
        token,
        is_spare=is_spare,
        least=found.least,
        last_call_s=last_call_s,
        tls_config=_file(settings.of("tls_config")),
        by_hand=by_hand,
        store=store,
        silence_s=settings.number("node_timeout"),
        leaves=leaves,
    )


def _store(setting: Setting) -> tuple[tuple[str, int], ...]:
    """The members of an etcd, as in ``etcd://host:2379,other:2379``."""
    if not setting.text:
        return ()
    scheme, _, rest = setting.text.partition("://")
    if scheme in {"etcds", "https"} or "@" in rest:
        raise UsageError(f"{setting.shown}: TLS, users and passwords are not supported with etcd")
    hosts = rest.rstrip("/").split(",")
    if scheme != "etcd" or not all(hosts) or "/" in rest.rstrip("/"):
        raise UsageError(f"{setting.shown} must be etcd://HOST:PORT, or several with commas")
    members = (endpoint(setting._replace(text=host)) for host in hosts)
    return tuple((host, port or _ETCD_PORT) for host, port in members)


def _last_call_s(setting: Setting) -> float:
    """How long the least number of nodes waits for more, as torchrun's rendezvous has it."""
    text = rank_maps.check_pairs(setting).get("last_call_timeout", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_LAST_CALL_S:
        raise UsageError(f"{setting.shown}: last_call_timeout must be a number of seconds")
    return seconds


def _file(setting: Setting) -> Path | None:
    return Path(setting.text).absolute() if setting.text else None


def meeting_port(settings: Settings, given: int | None) -> int:
    """Where several nodes meet: all must name the same port.

    Raises:
        UsageError: a free one is asked for.
    """
    port = settings.integer("master_port") if "master_port" in settings.given else None
    at = settings.of("rdzv_endpoint")
    if given is None and (port == 0 or (at.text and endpoint(at)[1] == 0)):
        shown = (settings.of("master_port") if port == 0 else at).shown
        raise UsageError(f"{shown}: 0 means a free port, but all nodes must name the same one")
    return given or _PORTS[_backend(settings.of("rdzv_backend"))]


def _local(settings: Settings, environ: Mapping[str, str]) -> int | None:
    """Workers on this node, from either dialect; ``None``: neither says."""
    theirs = settings.integer("local_worker_num")
    if "nproc_per_node" not in settings.given:
        return theirs
    ours = _nproc(settings.of("nproc_per_node"), environ)
    if theirs not in {None, ours}:
        raise disagreement(settings.of("local_worker_num"), settings.of("nproc_per_node"))
    return ours


def _nproc(setting: Setting, environ: Mapping[str, str]) -> int:
    """A number of workers, or as many as there are devices of the named kind."""
    try:
        count = int(setting.text)
    except ValueError:
        from agent.machine.devices import device_count

        try:
            return device_count(setting.text, environ)
        except UsageError as error:
            raise UsageError(f"{setting.shown}: {error}") from None
    if count < 1:
        raise UsageError(f"{setting.shown} must be at least 1")
    return count


def _nnodes(setting: Setting) -> tuple[int, int]:
    """With how many nodes the job may begin, and how many it can have."""
    try:
        bounds = [int(part) for part in setting.text.split(":")]
    except ValueError:
        bounds = []
    match bounds:
        case [low] | [low, _] if low < 1:
            raise UsageError(f"{setting.shown} must be at least 1")
        case [low]:
            return low, low
        case [low, high] if low <= high:
            return low, high
    raise UsageError(f"{setting.shown} must be a number of nodes, or MIN:MAX with MIN <= MAX")


def _checked(settings: Settings, found: JobSize) -> JobSize:
    """Refuse a size that no node can run."""
    if found.nproc <= WORKERS_MAX:
        return found
    given = (dest for dest in ("worker_num", "local_worker_num", "nproc_per_node"))
    named = [settings.of(dest).shown for dest in given if dest in settings.given]
    raise UsageError(f"{' and '.join(named)}: a node runs at most {WORKERS_MAX} workers")


def master(settings: Settings, warnings: list[str]) -> MasterAddress:
    """The store's address, by torchrun's rules for one node.

    A fixed port is bound only on request. ``warnings`` gets a sentence for what is ignored.
    """
    port = settings.integer("master_port") or None
    local_addr = settings.text("local_addr")
    if settings.boolean("standalone"):
        _warn_overridden(settings, warnings)
        return MasterAddress(local_addr or BY_DEST["master_addr"].default, None)
    backend = _backend(settings.of("rdzv_backend"))
    conf = rank_maps.check_pairs(settings.of("rdzv_conf"))
    addr = _unbracketed(settings.text("master_addr"))
    endpoint = settings.of("rdzv_endpoint")
    if endpoint.text and not (backend == "c10d" and conf.get("store_type") == "file"):
        return _at_endpoint(settings, backend, endpoint)
    if local_addr and "master_addr" not in settings.given:
        addr = local_addr
    return MasterAddress(addr, port)


def _warn_overridden(settings: Settings, warnings: list[str]) -> None:
    """Warn of the options that --standalone overrides, as it does in torchrun."""
    others = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
    lost = [settings.of(dest).shown for dest in others if dest in settings.given]
    if lost:
        warnings.append(f"{settings.of('standalone').shown} overrides {', '.join(lost)}.")


def _backend(setting: Setting) -> str:
    """One of torchrun's two backends, or the name by which torchrun hands over to msrun."""
    if setting.text in _BACKENDS:
        return setting.text
    if setting.text.startswith("etcd"):
        raise UsageError(
            f"{setting.shown}: etcd is not supported, use static or c10d; beside these, "
            "--controller-store takes one"
        )
    raise UsageError(f"{setting.shown} is an unknown backend, use static or c10d")


def _at_endpoint(settings: Settings, backend: str, setting: Setting) -> MasterAddress:
    """The store's address from --rdzv-endpoint; --master-addr and --master-port may repeat it."""
    host, port = endpoint(setting)
    if backend == "static" and port is None:
        raise UsageError(f"{setting.shown} needs a port, as in {host}:29500")
    addr_given, port_given = (settings.given.get(dest) for dest in ("master_addr", "master_port"))
    if addr_given and not _same_host(_unbracketed(addr_given.text), host):
        raise disagreement(addr_given, setting)
    if port_given:
        repeated = bounded(port_given, BY_DEST["master_port"])
        if port not in {None, repeated}:
            raise disagreement(port_given, setting)
        port = repeated
    return MasterAddress(host, port or None)


def endpoint(setting: Setting) -> tuple[str, int | None]:
    """Host and port of ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``."""
    text = setting.text
    if text.count(":") > 1 and not text.startswith("["):
        return text, None  # an IPv6 address without brackets has no room for a port
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        raise UsageError(f"{setting.shown} must be host or host:port")
    host, port = match["v6"] or match["host"], match["port"]
    if port is None:
        return host, None
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise UsageError(f"{setting.shown}: the port must be a number from 0 to {PORT_MAX}")
    return host, int(port)


def _unbracketed(addr: str) -> str:
    """The address itself: torchrun wants an IPv6 one in brackets, as in ``[::1]``."""
    return addr[1:-1] if addr.startswith("[") and addr.endswith("]") else addr


def _same_host(one: str, other: str) -> bool:
    """Whether two spellings name one host, as far as msrun can tell without DNS."""
    return one.lower() == other.lower() or {one.lower(), other.lower()} <= _LOOPBACK


def bind(settings: Settings, nproc: int) -> BindSpec:
    """CPU binding from --bind-core, --bind-numa and --numa-binding."""
    core, numa = settings.of("bind_core"), _numa(settings)
    try:
        auto = truth(core)
    except UsageError:
        found = BindSpec(cores=rank_maps.cores(core, nproc))
    else:
        found = BindSpec(auto=auto, numa=numa)
    if numa is not None and (found.auto or found.cores):
        other = "bind_numa" if "bind_numa" in settings.given else "numa_binding"
        raise disagreement(core, settings.of(other))
    return found


def _numa(settings: Settings) -> str | None:
    """The NUMA mode, from either dialect."""
    ours, theirs = settings.text("numa_binding") or None, settings.given.get("bind_numa")
    if theirs is None:
        return ours
    mode: str | None = theirs.text
    if mode not in NUMA_MODES:
        try:
            mode = "node" if truth(theirs) else None
        except UsageError:
            choices = ", ".join(NUMA_MODES)
            raise UsageError(f"{theirs.shown} must be True, False or one of {choices}") from None
    if "numa_binding" in settings.given and mode != ours:
        raise disagreement(theirs, settings.of("numa_binding"))
    return mode
