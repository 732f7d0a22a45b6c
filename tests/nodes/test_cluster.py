"""The test bed itself: what machines made of namespaces share, what they do not, and their faults."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import bad_cables
from support.cluster import Cluster
from support.jobs import WORKERS, Launcher, marked, poll

from msrun.cluster import namespaces
from msrun.cluster.namespaces import ClusterError, refusal
from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram

Nodes = Callable[[int], Cluster]
PEER = (sys.executable, WORKERS / "peer.py")


def peer(node: ClusterNode, *words: object) -> NodeProgram:
    return node.run([*PEER, *words], stdin=subprocess.PIPE)


def listening(node: ClusterNode, *words: object) -> NodeProgram:
    door = peer(node, "listen", *words)
    door.await_output("listens")
    return door


def linked(
    one: ClusterNode, other: ClusterNode, port: int = 7000, *words: object
) -> tuple[NodeProgram, NodeProgram]:
    """The ends of a connection; the first has accepted it and knows ``words``."""
    door = listening(one, port, *words)
    caller = peer(other, "call", one.name, port)
    door.await_output(f"linked to {other.address}")
    caller.await_output(f"linked to {one.address}")
    return door, caller


def talk(one: NodeProgram, other: NodeProgram, line: str) -> None:
    """A line there and the same back."""
    one.say(line)
    other.await_output(f"heard {line}")
    other.say(line)
    one.await_output(f"heard {line}")


@contextlib.contextmanager
def tools() -> Iterator[None]:
    """nft may be missing, and a kernel may lack a kind of fault."""
    try:
        yield
    except ClusterError as error:
        if re.search("No such file|not supported|qdisc kind is unknown", str(error)):
            pytest.skip(str(error))
        raise


def test_each_node_has_a_name_processes_and_memory_of_its_own(nodes: Nodes) -> None:
    cluster = nodes(3)
    mine = f"mine-{cluster.mark}"
    look = f"cd /dev/shm; hostname; echo $$; touch {mine} /run/{mine}; ls; ls /run/*-*; ls /sys/class/net"
    look += "; grep nsfs /proc/self/mountinfo || echo free"  # it holds no other node's network
    seen = [node.run(["sh", "-c", look]) for node in cluster.nodes]
    assert [one.wait() for one in seen] == [0, 0, 0]
    names, pids, *rest = zip(*(one.output().split() for one in seen), strict=True)
    assert names == ("node0", "node1", "node2")
    assert max(map(int, pids)) < 100  # of the machine's there are more
    assert set(zip(*rest, strict=True)) == {(mine, f"/run/{mine}", "eth0", "lo", "free")}
    assert not Path("/dev/shm", mine).exists()


def test_nodes_share_files_but_not_their_folders_for_temporary_files_and_state(
    nodes: Nodes, tmp_path: Path
) -> None:
    cluster = nodes(2)
    where = [
        node.run(["sh", "-c", "echo $TMPDIR $XDG_STATE_HOME; ls -d $TMPDIR"])
        for node in cluster.nodes
    ]
    assert [one.wait() for one in where] == [0, 0]
    assert len({word for one in where for word in one.output().split()}) == 4
    writer = cluster.nodes[0].run(["sh", "-c", "echo $WHAT > here"], {"WHAT": "bread"}, tmp_path)
    assert writer.wait() == 0
    assert cluster.nodes[1].run(["cat", "here"], cwd=tmp_path, stdout=tmp_path / "out").wait() == 0
    assert (tmp_path / "out").read_text() == (tmp_path / "here").read_text() == "bread\n"


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_reach_each_other_by_name(nodes: Nodes, count: int) -> None:
    cluster = nodes(count)
    for one, other in itertools.combinations_with_replacement(cluster.nodes, 2):
        door, caller = linked(one, other)
        talk(caller, door, "hello")
        door.process.stdin.close()
        assert door.wait() == caller.wait() == 0


def test_how_a_program_ends_is_known_and_it_can_be_signalled(nodes: Nodes) -> None:
    node = nodes(2).nodes[1]
    assert node.run(["sh", "-c", "echo no >&2; exit 3"]).wait() == 3
    wrong = node.run(["no-such-program"])
    assert (wrong.wait(), wrong.errors()[:15]) == (127, "no-such-program")
    for signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
        sleeper = node.run(["sh", "-c", "echo up; exec sleep 1000"])
        sleeper.await_output("up")
        sleeper.signal(signum)
        assert sleeper.wait() == -signum
        sleeper.signal(signum)  # which harms nobody


def test_a_program_that_was_stopped_goes_on(nodes: Nodes) -> None:
    node = nodes(2).nodes[0]
    echo = node.run(["sh", "-c", "echo up; cat"], stdin=subprocess.PIPE)
    echo.await_output("up")
    echo.signal(signal.SIGSTOP)
    poll(lambda: " T " in Path(f"/proc/{echo.pid}/stat").read_text())
    echo.signal(signal.SIGCONT)
    echo.process.stdin.close()
    assert echo.wait() == 0


def test_who_is_left_behind_by_a_parent_is_reaped(nodes: Nodes) -> None:
    node = nodes(2).nodes[0]
    orphan = node.run(["sh", "-c", "sh -c 'read line' <&0 & echo $!"], stdin=subprocess.PIPE)
    assert orphan.wait() == 0
    orphan.process.stdin.close()
    gone = f"while [ -e /proc/{orphan.output().strip()} ]; do sleep 0.01; done"
    assert node.run(["sh", "-c", gone]).wait() == 0


def test_the_peers_of_a_killed_node_are_told(nodes: Nodes) -> None:
    cluster = nodes(3)
    door, caller = linked(cluster.nodes[0], cluster.nodes[1])
    bystander = linked(cluster.nodes[0], cluster.nodes[2], 7001)
    cluster.nodes[1].kill()
    assert caller.process.poll() == -signal.SIGKILL or caller.wait() == -signal.SIGKILL
    assert door.wait() == 0
    assert door.output().split()[-1] in {"end", "ConnectionResetError"}
    talk(*bystander, "still here")
    refused = peer(cluster.nodes[0], "call", "node1", 7000)
    assert refused.wait() == 0
    assert refused.output() == "ConnectionRefusedError\n"  # by a kernel that lives


def test_all_that_ran_on_a_killed_node_is_dead_when_kill_returns(nodes: Nodes) -> None:
    cluster = nodes(2)
    family = cluster.nodes[1].run(["sh", "-c", "setsid sleep 1000 & echo up; wait"])
    family.await_output("up")
    cluster.nodes[1].kill()
    on_node = [
        pid
        for pid, words in marked(cluster.mark).items()
        if "sleep" in words and "enter" not in words
    ]
    assert not on_node
    with pytest.raises(AssertionError, match="node1 is off"):
        cluster.nodes[1].run(["true"])


def test_nothing_passes_a_cut_cable_and_all_arrives_after_it_is_mended(nodes: Nodes) -> None:
    cluster = nodes(3)
    door, caller = linked(cluster.nodes[0], cluster.nodes[1])
    talk(caller, door, "before")
    cluster.nodes[1].cut()
    caller.say("meanwhile")
    late = peer(cluster.nodes[0], "call", "node1", 7001)
    assert late.wait() == 0
    assert late.output().strip() in {"TimeoutError", "OSError"}  # OSError: no route to it
    talk(*linked(cluster.nodes[0], cluster.nodes[2], 7002), "the others talk on")
    assert "meanwhile" not in door.output()
    assert door.process.poll() is None is caller.process.poll()
    cluster.nodes[1].mend()
    door.await_output("heard meanwhile")
    talk(door, caller, "after")


def test_a_powered_off_node_is_silent(nodes: Nodes) -> None:
    cluster = nodes(2)
    guarded, _ = linked(cluster.nodes[0], cluster.nodes[1], 7000, "guarded")
    trusting, _ = linked(cluster.nodes[0], cluster.nodes[1], 7001)
    cluster.nodes[1].poweroff()
    assert guarded.wait() == 0
    assert guarded.output().split()[-1] in {"TimeoutError", "OSError"}  # OSError: no route to it
    assert trusting.process.poll() is None
    assert trusting.output().split()[-1] == cluster.nodes[1].address  # nothing came after the link


@pytest.mark.parametrize("verb", ["kill", "poweroff"])
def test_a_node_that_was_off_boots_again(nodes: Nodes, verb: str) -> None:
    cluster = nodes(2)
    linked(cluster.nodes[0], cluster.nodes[1])
    for _ in range(2):
        getattr(cluster.nodes[1], verb)()
        cluster.nodes[1].boot()
        talk(*linked(cluster.nodes[1], cluster.nodes[0], 7001), "back again")
        name = cluster.nodes[1].run(["hostname"])
        assert (name.wait(), name.output()) == (0, "node1\n")


def test_a_rebooted_kernel_knows_no_connection_of_before(nodes: Nodes) -> None:
    cluster = nodes(2)
    door, _ = linked(cluster.nodes[0], cluster.nodes[1])
    cluster.nodes[1].poweroff()
    cluster.nodes[1].boot()
    door.say("who are you?")
    assert door.wait() == 0
    assert door.output().split()[-1] == "ConnectionResetError"


def retransmitted(node: ClusterNode) -> int:
    table = node.run(["grep", "^Tcp:", "/proc/net/snmp"])
    table.wait()
    names, figures = (line.split() for line in table.output().splitlines())
    return int(figures[names.index("RetransSegs")])


def test_lost_packets_are_sent_again(nodes: Nodes) -> None:
    cluster = nodes(2)
    door, caller = linked(cluster.nodes[0], cluster.nodes[1])
    with tools():
        bad_cables.lose(cluster, 0, 50)
    for number in range(60):
        talk(caller, door, f"line {number};")
        if retransmitted(cluster.nodes[1]):
            break
    else:
        pytest.fail("60 lines arrived, half of all packets lost, and none was sent twice")
    bad_cables.lose(cluster, 0, 100)
    dead = peer(cluster.nodes[1], "call", "node0", 7001)
    assert (dead.wait(), dead.output()) == (0, "TimeoutError\n")
    bad_cables.mend(cluster, 0)
    talk(*linked(cluster.nodes[0], cluster.nodes[1], 7002), "clear")


def test_a_limited_node_sends_no_faster(nodes: Nodes) -> None:
    cluster = nodes(2)
    sends = "import socket; socket.create_connection(('node0', 7000)).sendall(bytes(512 << 10))"
    takes = (
        "import socket, time; c = socket.create_server(('', 7000)); print('listens', flush=True);"
        "c = c.accept()[0]; began = time.monotonic(); n = sum(map(len, iter(lambda: c.recv(65536), b'')));"
        "print(n, time.monotonic() - began)"
    )
    with tools():
        bad_cables.limit(cluster, 1, "4mbit")
    door = cluster.nodes[0].run([sys.executable, "-c", takes])
    door.await_output("listens")
    assert cluster.nodes[1].run([sys.executable, "-c", sends]).wait() == 0
    assert door.wait() == 0
    size, seconds = door.output().split()[1:]
    assert int(size) == 512 << 10
    assert float(seconds) > (512 - 64 - 64) * 8192 / 4e6  # less the burst and what came first
    bad_cables.mend(cluster, 1)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "NEEDED", ("sh", "ipp", "unsharee"))
    assert "ipp and unsharee would have to be installed" in refusal.__wrapped__()


def test_a_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "NEW_WORLD", ("sh", "-c", "echo not you >&2; exit 1"))
    assert refusal.__wrapped__().startswith(
        "nodes of namespaces are refused to this user (not you): "
    )


KINDS = ("net", "pid", "uts", "mnt", "user")
KEEPER = """
import json, os, signal, sys
from pathlib import Path
from support.cluster import Cluster
with Cluster(3, Path(sys.argv[1]), sys.argv[2]) as cluster:
    pids = [cluster.switch.pid] + [node.pid for node in cluster.nodes]
    stays = cluster.nodes[1].run(["sh", "-c", "setsid sleep 1000 & echo up; wait"])
    stays.await_output("up")
    spaces = [os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in ("net", "pid", "uts", "mnt", "user")]
    print(json.dumps(spaces), flush=True)
    signal.pause()
"""


def users(spaces: set[str]) -> list[str]:
    """Processes in one of these namespaces."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for kind in KINDS:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/{kind}") in spaces:
                    found.append(f"{kind} of {pid}")
    return found


def test_nothing_is_left_of_a_cluster_whose_test_process_was_killed(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    launcher = Launcher(tmp_path)
    own = launcher.env()
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, tmp_path, launcher.mark],
        env={**own, "PYTHONPATH": f"{WORKERS.parent}:{own['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
    )
    with keeper:
        spaces = set(json.loads(keeper.stdout.readline()))
        assert not spaces & {os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}
        assert len(users(spaces)) > 10
        keeper.kill()
    poll(lambda: not launcher.marked())
    poll(lambda: not users(spaces))


ADOPTS = """
import os, signal, sys
from pathlib import Path
from agent.workers.processes import become_subreaper
from msrun.cluster.cluster import Cluster
become_subreaper()
with Cluster(2, Path(sys.argv[1]), {}) as cluster:
    programs = [node.run(["sleep", "1000"]) for node in cluster.nodes]
    for program in programs:
        os.kill(program.process.pid, signal.SIGKILL)
        program.process.wait()
    cluster.nodes[0].kill()
print("closed")
"""


def test_who_adopts_orphans_can_end_a_cluster_too(tmp_path: Path) -> None:
    """A namespace ends once all in it were reaped: those that a drill has adopted, by the drill."""
    if why := refusal():
        pytest.skip(why)
    command = [sys.executable, "-c", ADOPTS, tmp_path]
    own = Launcher(tmp_path).env()
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("closed\n", "")


@pytest.mark.torch
def test_gloo_works_over_the_nodes(nodes: Nodes) -> None:
    cluster = nodes(3)
    ranks = [
        node.run(
            [sys.executable, WORKERS / "allreduce.py"],
            {
                "MASTER_ADDR": "node0",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "RANK": str(node.index),
                "WORLD_SIZE": "3",
                "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_RESTART_COUNT": "1",
            },
        )
        for node in cluster.nodes
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.errors() for rank in ranks]
    assert [rank.output() for rank in ranks] == ["sum 3\n"] * 3
