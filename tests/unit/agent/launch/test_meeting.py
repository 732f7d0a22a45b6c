"""Nodes meet before anything of the job starts: who listens, what each is told, and what is refused."""

import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import checkpoints

from agent.launch import meeting
from agent.launch.job_token import JobToken
from agent.launch.meeting import await_name, meet
from agent.nodes.checkpoint_copy import CheckpointPlace
from agent.spec.job_spec import (
    ClusterSpec,
    HandSpec,
    JobSpec,
    NotStartedError,
    Program,
    ProgramKind,
    Timeouts,
    UsageError,
)

LONG_S = 30.0  # no test waits for it to pass


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Place:
    """Two nodes on this machine, each with a home of its own."""

    def __init__(self, folder):
        self.folder, self.port, self.said, self.met = folder, free_port(), {}, []

    def spec(self, node_rank=0, nproc=1, **changes):
        cluster = changes.pop("cluster", ClusterSpec(2, None, node_rank))
        return JobSpec(
            program=Program("t.py", (), ProgramKind.SCRIPT, "/usr/bin/python3"),
            nproc=nproc,
            run_id=f"record{node_rank}",
            record_id=f"record{node_rank}",
            cluster=cluster,
            master_addr="127.0.0.1",
            master_port=self.port,
            timeouts=Timeouts(start_s=LONG_S),
        )._replace(**changes)

    def meet(self, spec, token="", home=""):
        home = self.folder / (home or spec.record_id)
        home.mkdir(exist_ok=True)
        environ = {"XDG_STATE_HOME": str(home), "HOME": str(home), "MSRUN_TOKEN": token}
        said = self.said.setdefault(spec.record_id, [])
        met = meet(spec, environ, "1.0", said.append)
        self.met.append(met)
        return met

    def both(self, *specs, tokens=("", ""), homes=("", "")):
        """Each node's end, which may be an exception."""
        with ThreadPoolExecutor(2) as pool:
            ends = [
                pool.submit(self.meet, *each) for each in zip(specs, tokens, homes, strict=True)
            ]
            return [end.exception(LONG_S) or end.result() for end in ends]

    def close(self):
        for met in self.met:
            met.prepared.listener.close()
            os.close(met.prepared.lock)
            for line in met.lines.values():
                line.connection.close()
            if met.door is not None:
                met.door.close()


def makes_token(node_rank):
    return ClusterSpec(2, None, node_rank, own_token="slurm-1.0-0-7")


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.close()


def test_each_knows_its_ranks_and_what_all_must_know_alike(place):
    first, second = place.both(place.spec(0, 2, max_restarts=3), place.spec(1, 3))
    specs = first.prepared.spec, second.prepared.spec
    assert [spec.nodes for spec in specs] == [(2, 3), (2, 3)]
    assert [spec.ranks_here for spec in specs] == [(0, 1), (2, 3, 4)]
    assert [spec.world_size for spec in specs] == [5, 5]
    assert [spec.run_id for spec in specs] == ["record0", "record0"]
    assert [spec.max_restarts for spec in specs] == [3, 3]
    assert [spec.is_controlled for spec in specs] == [False, True]
    assert [spec.saves_as for spec in specs] == ["record0", "record0"]
    assert second.prepared.port == first.prepared.port != place.port
    assert (first.door is None, second.door is None) == (False, True)
    assert list(first.lines) == [1]
    assert list(second.lines) == [0]
    assert first.interface == second.interface == "lo"


def test_no_node_leaves_between_the_meeting_and_its_run(place, monkeypatch):
    deferred = []
    monkeypatch.setattr(meeting.signals, "defer", lambda spec: deferred.append(spec.record_id))
    place.both(place.spec(0), place.spec(1))
    assert deferred == ["record0", "record1"]  # node 0 before it lets the other one begin


def test_how_long_a_node_may_be_silent_is_what_node_0_says(place):
    limits = 30.0, 7.0
    clusters = [ClusterSpec(2, None, rank, silence_s=each) for rank, each in enumerate(limits)]
    both = place.both(*(place.spec(rank, cluster=each) for rank, each in enumerate(clusters)))
    assert [met.prepared.spec.silence_s for met in both] == [30.0, 30.0]
    kernel = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    lines = [line for met in both for line in met.lines.values()]
    assert [line.connection.getsockopt(*kernel) for line in lines] == [30_000, 30_000]


def test_without_ranks_the_owner_of_the_address_is_node_0(place):
    first, second = place.both(
        *(place.spec(number, number + 1, cluster=ClusterSpec(2)) for number in (0, 1))
    )
    by_rank = sorted((first, second), key=lambda met: met.prepared.spec.node_rank)
    assert [met.prepared.spec.node_rank for met in by_rank] == [0, 1]
    assert by_rank[0].door is not None  # whoever was first on this machine
    assert by_rank[0].prepared.spec.nodes == by_rank[1].prepared.spec.nodes


def test_the_port_that_another_job_has_is_named_by_node_0(place):
    why = f"port {place.port} on 127.0.0.1 is already in use"
    with socket.create_server(("127.0.0.1", place.port)), pytest.raises(UsageError, match=why):
        place.meet(place.spec(0))


def test_a_host_that_is_another_machine_is_no_place_for_node_0(place):
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        place.meet(place.spec(0, master_addr="192.0.2.1"))


class LateNames:
    """A name server that knows nothing at first."""

    def __init__(self, monkeypatch, times, code=socket.EAI_NONAME):
        self.left, self.code = times, code
        self._real = socket.getaddrinfo
        monkeypatch.setattr(meeting, "NAME_LOOK_S", 0.001)
        for word in ("FIRST_WORD_S", "NEXT_WORD_S"):
            monkeypatch.setattr(meeting, word, 0.0)
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, *args, **more):
        self.left -= 1
        if self.left >= 0:
            raise socket.gaierror(self.code, "Name or service not known")
        return self._real(*args, **more)


@pytest.mark.parametrize(
    "cluster",
    [ClusterSpec(2, None, 0), ClusterSpec(2), ClusterSpec(2, by_hand=HandSpec(has_worker=False))],
    ids=["first", "without a number", "scheduler"],
)
def test_who_may_be_node_0_waits_until_its_name_is_known(place, monkeypatch, cluster):
    LateNames(monkeypatch, 3)
    said = []
    await_name(place.spec(cluster=cluster), said.append)
    why = f"127.0.0.1:{place.port} does not resolve (Name or service not known)"
    assert said == [f"waiting to begin: {why}"] * 3


@pytest.mark.parametrize(
    "cluster",
    [
        *(ClusterSpec(2, None, 1), ClusterSpec(2, is_spare=True)),
        ClusterSpec(2, by_hand=HandSpec(has_worker=True)),
    ],
    ids=["second", "spare", "worker"],
)
def test_who_is_not_node_0_in_any_case_does_not_ask_for_its_name(place, monkeypatch, cluster):
    names = LateNames(monkeypatch, 1)
    await_name(place.spec(cluster=cluster), pytest.fail)
    assert names.left == 1


def test_a_name_that_is_never_known_ends_the_wait(place, monkeypatch):
    LateNames(monkeypatch, 10**9)
    spec = place.spec(timeouts=Timeouts(start_s=0.05))
    why = rf"did not begin within .*: 127\.0\.0\.1:{place.port} does not resolve \(Name or"
    with pytest.raises(NotStartedError, match=why) as raised:
        await_name(spec, lambda _: None)
    assert raised.value.exit_code == 1


def test_what_can_be_no_name_is_not_waited_for(place):
    host = "a" * 70
    await_name(place.spec(master_addr=host), pytest.fail)
    with pytest.raises(UsageError, match="does not resolve"):
        place.meet(place.spec(master_addr=host))


def test_an_open_door_is_said_and_a_token_closes_it(place):
    place.both(place.spec(0), place.spec(1))
    assert f"whoever reaches port {place.port} may join" in place.said["record0"][0]
    assert "MSRUN_TOKEN" in place.said["record0"][0]
    assert not any("may join" in line for line in place.said["record1"])
    place.said.clear()
    place.port = free_port()
    place.both(
        place.spec(0, record_id="a", run_id="a"),
        place.spec(1, record_id="b", run_id="b"),
        tokens=("t", "t"),
    )
    assert not any("may join" in line for line in place.said["a"])


def test_nodes_of_one_home_make_a_token(place):
    specs = [place.spec(rank, cluster=makes_token(rank)) for rank in (0, 1)]
    first, second = place.both(*specs, homes=("home", "home"))
    assert len(first.token) == 64
    assert first.token == second.token
    assert not any("may join" in line for line in place.said["record0"])
    (kept,) = (place.folder / "home/msrun/tokens/slurm-1.0-0-7").iterdir()
    assert kept.read_bytes().strip() == first.token  # for nodes that come late


def test_nodes_of_two_homes_meet_without_a_token(place, monkeypatch):
    monkeypatch.setattr(JobToken.make, "__defaults__", (0.2,))
    first, second = place.both(*(place.spec(rank, cluster=makes_token(rank)) for rank in (0, 1)))
    assert first.token == second.token == b""
    assert "may join" in place.said["record0"][0]
    assert not any(place.folder.rglob("tokens/*"))


def test_a_token_that_no_node_needs_any_more_is_deleted(place, tmp_path):
    """Node 1 has come, and goes: the job does not begin."""
    token = JobToken(makes_token(1), {"XDG_STATE_HOME": str(tmp_path / "home")})
    spec = place.spec(0, cluster=makes_token(0), timeouts=Timeouts(start_s=0.1))
    with token.marked(), pytest.raises(NotStartedError, match="not all nodes came"):
        place.meet(spec, home="home")
    assert not any(place.folder.rglob("tokens/*"))


def test_a_node_with_another_token_is_refused_and_the_job_waits_on(place):
    waiting = threading.Event()

    def first():
        waiting.set()
        with pytest.raises(NotStartedError, match="not all nodes came within") as raised:
            place.meet(place.spec(0, timeouts=Timeouts(start_s=2.0)), "right")
        return raised.value

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(first)
        waiting.wait(LONG_S)
        with pytest.raises(NotStartedError, match="token") as raised:
            place.meet(place.spec(1), "wrong")
        assert raised.value.exit_code == 2
        error = end.result(LONG_S)
    assert error.exit_code == 1
    assert "refused was: " in str(error)


def test_the_token_is_read_from_a_file_and_blanks_around_it_do_not_count(place, tmp_path):
    files = [tmp_path / name for name in ("one", "two")]
    files[0].write_text("secret\n")
    files[1].write_text("  secret")
    first, second = place.both(
        *(place.spec(rank, cluster=ClusterSpec(2, None, rank, files[rank])) for rank in (0, 1)),
        tokens=("this variable", "is not looked at"),
    )
    assert first.token == second.token == b"secret"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, r"cannot be read \(No such file or directory\)"), (" \n", "is empty")],
)
def test_a_token_file_that_holds_none_is_named(place, tmp_path, content, words):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=f"--token-file {file} {words}"):
        place.meet(place.spec(0, cluster=ClusterSpec(2, None, 0, file)))


def test_if_node_0_cannot_prepare_the_run_the_others_are_told(place, monkeypatch):
    prepare = meeting.prepare

    def fails_first(spec, environ, listener):
        if spec.node_rank == 0:
            listener.close()
            raise UsageError("the log folder is in use")
        return prepare(spec, environ, listener)

    monkeypatch.setattr(meeting, "prepare", fails_first)
    first, second = place.both(place.spec(0), place.spec(1))
    assert str(first) == "the log folder is in use"
    assert isinstance(second, NotStartedError)
    assert str(second) == f"{socket.gethostname()}: the log folder is in use"
    assert second.exit_code == first.exit_code == 2


def not_writable(spec, monkeypatch, folder):
    (held := folder / "held").mkdir()
    real = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != held and real(path, mode))
    return spec._replace(logs=spec.logs._replace(log_dir=held / "logs"))


def with_few_files(spec, monkeypatch, _):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    return spec


def with_one_device(spec, _monkeypatch, _folder):
    return spec._replace(nproc=2, virtual_local_rank=True)


@pytest.mark.parametrize(
    ("has", "why"),
    [
        (not_writable, r"--log-dir .*logs cannot be written \(Permission denied\)"),
        (with_few_files, "too few files can be opened"),
        (with_one_device, "CUDA_VISIBLE_DEVICES"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_with_a_node_is_said_before_it_meets_others(
    place, tmp_path, monkeypatch, rank, has, why
):
    """Else the others would begin, and lose it at once."""
    environ = {"XDG_STATE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    spec = has(place.spec(rank), monkeypatch, tmp_path)
    with pytest.raises(UsageError, match=why) as raised:
        meet(spec, environ, "1.0", pytest.fail)
    assert raised.value.exit_code == 2
    assert not any(tmp_path.rglob("logs"))


def resuming(place, path):
    spec = place.spec(0)
    return spec._replace(dump=spec.dump._replace(resume=path, resume_step=7))


def test_all_nodes_know_which_checkpoint_is_resumed(place, tmp_path):
    path = checkpoints.saved(tmp_path)
    first, second = place.both(resuming(place, path), place.spec(1))
    try:
        assert first.prepared.spec.dump.resume == second.prepared.spec.dump.resume == path
        assert first.checkpoint.place.is_here()
        assert second.checkpoint is None
    finally:
        first.checkpoint.close()


def test_a_node_that_cannot_have_the_checkpoint_is_stopped(place, tmp_path, monkeypatch):
    path = checkpoints.saved(tmp_path)
    monkeypatch.setattr(CheckpointPlace, "is_here", lambda _: False)
    checkpoints.flipped(path / checkpoints.SHARD)
    first, second = place.both(resuming(place, path), place.spec(1))
    first.checkpoint.close()
    assert isinstance(second, UsageError)
    assert "cannot be copied to" in str(second)
