"""What cannot be meant is refused in one sentence that names what was given, and where."""

from __future__ import annotations

import pytest

from agent.spec.job_spec import UsageError
from msrun.job.request import parse


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every case runs beside a script, a program, a plain file and an empty folder."""
    (tmp_path / "t.py").touch()
    (tmp_path / "plain").touch()
    (tmp_path / "run.sh").touch(mode=0o755)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _job(line, environ=None):
    return parse([*line.split(), "t.py"], environ or {}).job


UNORDERED = [
    ("--freeze_timeout 9 --update_grace 9", {}, "--freeze_timeout=9", "--update_grace=9"),
    ("--dump_timeout 9 --shutdown-timeout 8", {}, "--dump_timeout=9", "--shutdown-timeout=8"),
    ("--freeze_timeout 30 --scheduler_grace 30", {}, "--freeze_timeout=30", "--scheduler_grace=30"),
    (
        "--dump_timeout 9",
        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"},
        "--dump_timeout=9",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=9",
    ),
]


@pytest.mark.parametrize(("line", "environ", "one", "other"), UNORDERED)
def test_times_out_of_order_are_both_named(line, environ, one, other):
    with pytest.raises(UsageError) as raised:
        _job(line, environ)
    assert str(raised.value).startswith(f"{one} leaves no room within {other}: ")


@pytest.mark.parametrize("text", ["TTP:1", "{TTP:yes}", "{TTP:1"])
def test_switches_that_cannot_be_read_are_refused(text):
    with pytest.raises(UsageError, match=r"MS_ENABLE_TFT=.* must be like \{TTP:1,UCE:0\}"):
        _job("", {"MS_ENABLE_TFT": text})


BOTH = [
    ("--worker_num 8 --nproc-per-node 3", "--worker_num=8", "--nproc-per-node=3"),
    ("--worker_num 8 --nproc-per-node 4 --nnodes 1", "--worker_num=8", "--nnodes=1"),
    ("--worker_num 7 --nnodes 2", "--worker_num=7", "--nnodes=2"),
    ("--worker_num 4 --local_worker_num 8", "--worker_num=4", "--local_worker_num=8"),
    ("--local_worker_num 8 --nproc-per-node 4", "--local_worker_num=8", "--nproc-per-node=4"),
    ("--rdzv-endpoint h:5 --master-port 6", "--rdzv-endpoint=h:5", "--master-port=6"),
    ("--rdzv-endpoint h:5 --master-addr g", "--rdzv-endpoint=h:5", "--master-addr=g"),
    ("--bind_numa socket --numa-binding node", "--bind_numa=socket", "--numa-binding=node"),
    ("--bind_numa False --numa-binding node", "--bind_numa=False", "--numa-binding=node"),
    ("--bind_core True --bind_numa True", "--bind_core=True", "--bind_numa=True"),
]


@pytest.mark.parametrize(("line", "one", "other"), BOTH)
def test_dialects_that_disagree_are_both_named(line, one, other):
    with pytest.raises(UsageError) as raised:
        _job(line)
    assert one in str(raised.value)
    assert other in str(raised.value)
    assert "disagree" in str(raised.value)


def test_layers_that_disagree_are_named_by_their_source():
    with pytest.raises(UsageError, match=r"--worker_num=8 and PET_NPROC_PER_NODE=2 disagree"):
        _job("--worker_num=8", {"PET_NPROC_PER_NODE": "2"})


NODES = [
    ("--nnodes 2 --standalone", "--standalone is for one node: leave it out"),
    ("--nnodes 2 --spare-devices 1", "--spare-devices is not supported on several nodes yet"),
    ("--nnodes 2 --node-rank 2", "--node-rank=2: the ranks of 2 nodes are 0 to 1"),
]


@pytest.mark.parametrize(("line", "words"), NODES)
def test_what_several_nodes_cannot_do_is_named(line, words):
    with pytest.raises(UsageError) as raised:
        _job(line)
    assert words in str(raised.value)


WRONG = [
    ("--nproc-per-node 0", "--nproc-per-node=0 must be at least 1"),
    ("--nproc-per-node -1", "--nproc-per-node=-1 must be at least 1"),
    ("--nproc-per-node 1000000000", "a node runs at most 10000 workers"),
    ("--nproc-per-node 1e9", "neither a number"),
    ("--nproc-per-node many", "--nproc-per-node=many: 'many' is neither a number"),
    ("--worker_num 0", "--worker_num=0 must be at least 1"),
    ("--worker_num -1", "--worker_num=-1 must be at least 1"),
    ("--worker_num 1000000000", "--worker_num=1000000000: a node runs at most"),
    ("--worker_num x", "--worker_num=x is not a whole number"),
    ("--nnodes 0", "must be at least 1"),
    ("--nnodes 0:2", "must be at least 1"),
    ("--nnodes 2:1", "MIN <= MAX"),
    ("--nnodes 1:2:3", "MIN:MAX"),
    ("--nnodes x", "MIN:MAX"),
    ("--nnodes 2:4 --worker_num 8", "--worker_num=8 and --nnodes=2:4 disagree"),
    ("--nnodes 2:4 --rdzv-conf last_call_timeout=soon", "last_call_timeout must be a number"),
    ("--nnodes 2:4 --rdzv-conf last_call_timeout=nan", "last_call_timeout must be a number"),
    ("--node-rank -2", "must be at least -1"),
    ("--max-restarts -1", "--max-restarts=-1 must be at least 0"),
    ("--max-restarts many", "is not a whole number"),
    ("--monitor-interval 0", "--monitor-interval=0 must be above 0"),
    ("--monitor-interval nan", "must be above 0"),
    ("--monitor-interval x", "is not a number"),
    ("--master-port 65536", "must be at most 65535"),
    ("--master-port -1", "must be at least 0"),
    ("--master-port x", "is not a whole number"),
    ("--rdzv-endpoint h:65536", "the port must be a number from 0 to 65535"),
    ("--rdzv-endpoint h:x", "the port must be a number"),
    ("--rdzv-endpoint h:", "the port must be a number"),
    ("--rdzv-endpoint h", "needs a port, as in h:29500"),
    ("--rdzv-endpoint :5", "must be host or host:port"),
    ("--rdzv-endpoint [::1", "must be host or host:port"),
    ("--rdzv-backend zeus", "is an unknown backend, use static or c10d"),
    ("--rdzv-backend etcd", "etcd is not supported, use static or c10d"),
    ("--rdzv-backend etcd-v2", "etcd is not supported"),
    ("--controller-store zk://h:2181", "must be etcd://HOST:PORT, or several with commas"),
    ("--controller-store etcd://", "must be etcd://HOST:PORT"),
    ("--controller-store etcd://a:2379,,b", "must be etcd://HOST:PORT"),
    ("--controller-store etcd://a:2379/v3", "must be etcd://HOST:PORT"),
    ("--controller-store etcd://a:x", "the port must be a number"),
    ("--controller-store etcds://a:2379", "TLS, users and passwords are not supported with etcd"),
    ("--controller-store etcd://me:secret@a:2379", "users and passwords are not supported"),
    ("--rdzv-conf a", "every key needs a value"),
    ("--rdzv-conf a=1,b=", "every key needs a value"),
    ("--rdzv-conf =1", "every key needs a value"),
    ("--rdzv-id a/b", "no slash"),
    ("--start-method bogus", "choose from auto, spawn, fork, forkserver"),
    ("--event-log-handler x", "choose from null, console"),
    ("--numa-binding x", "choose from node, socket"),
    ("--logs-specs mine", "choose from default"),
    ("--bind_numa x", "must be True, False or one of node"),
    ("--bind_core maybe", "must be True, False or JSON"),
    ("--bind_core {}", "must be True, False or JSON"),
    ("--bind_core [1]", "must be True, False or JSON"),
    ('--bind_core {"device1":["0"]}', "'device1' is not one of device0 to device0"),
    ('--bind_core {"device0":["3-1"]}', "'3-1' is not a range of cores"),
    ('--bind_core {"device0":["a"]}', "'a' is not a range of cores"),
    ('--bind_core {"device0":[]}', "at least one core"),
    ("--join maybe", "--join=maybe must be True or False"),
    ("-r 4", "-r=4 must be 0, 1 (stdout), 2 (stderr) or 3 (both)"),
    ("-t 0:4", "must be 0, 1 (stdout)"),
    ("-t 0:1,", "must be 0, 1 (stdout)"),
    ("--redirects x", "must be 0, 1 (stdout)"),
    ("--local-ranks-filter a", "comma-separated list of ranks"),
    ("--local-ranks-filter -1", "must not name a rank below 0"),
    ("--tail_worker_log 1", "the ranks are 0 to 0, or -1 for all"),
    ("--tail_worker_log x", "comma-separated list of ranks"),
    ("--tail_worker_log -2", "below -1"),
    ("--worker_log_name a/b", "without a slash"),
    ("--log-dir plain", "--log-dir=plain is not a folder"),
    ("--log-dir plain/x", "--log-dir=plain/x is not a folder"),
    ("--rank_table_file nope", "does not exist"),
    ("--sim_level 4", "must be at most 3"),
    ("--dry_run --sim_rank_id 1", "the ranks are 0 to 0"),
    ("--cluster_time_out 0", "must be above 0, or negative to set no bound"),
    ("--shutdown-timeout -1", "must be at least 0"),
    ("--freeze_timeout 0", "--freeze_timeout=0 must be above 0"),
    ("--update_grace nan", "--update_grace=nan must be above 0"),
    ("--audit x", "--audit=x must be a share of the time from 0 to 100, such as 0.5%"),
    ("--audit 101", "--audit=101 must be a share"),
    ("--dump_timeout inf", "--dump_timeout=inf must be above 0"),
    ("--scheduler_grace x", "--scheduler_grace=x is not a number"),
    ("--dump_fallback plain/x", "--dump_fallback=plain/x is not a folder"),
    ("--is_recover maybe", "--is_recover=maybe must be True or False"),
    ("--preload a-b", "'a-b' is not the name of a module"),
    ("--module --no-python", "exclude each other"),
    ("--config nope.yaml", "nope.yaml cannot be read"),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_a_wrong_value_is_one_sentence_that_names_it(line, said):
    with pytest.raises(UsageError) as raised:
        _job(line)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PET_START_METHOD": "bogus"}, "PET_START_METHOD=bogus: choose from"),
        ({"PET_STANDALONE": "maybe"}, "PET_STANDALONE=maybe must be True or False"),
        ({"PET_NNODES": "x"}, "PET_NNODES=x must be"),
        ({"PET_MASTER_PORT": "x"}, "PET_MASTER_PORT=x is not"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x is not"),
        ({"PET_VIRTUAL_LOCAL_RANK": "1", "PET_WORKER_NUM": "2", "CUDA_VISIBLE_DEVICES": "0"}, "lists 1 for 2 workers"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(environ, said):
    with pytest.raises(UsageError) as raised:
        _job("", environ)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no script was given (usage: msrun"),
        (["--standalone"], "no script was given"),
        (["nope.py"], "there is no script 'nope.py'"),
        (["statsu"], "there is no script 'statsu' (did you mean msrun status?)"),
        ([""], "there is no script ''"),
        (["x" * 5000], "there is no script 'xxx"),
        (["empty"], "'empty' is a directory without __main__.py"),
        (["--run-path", "nope.py"], "there is no script"),
        (["-m", ""], "--module needs the name of a module"),
        (["--no-python", "./plain"], "plain has no exec permission"),
        (["--no-python", "./nope"], "there is no program './nope'"),
        (["--no-python", "./empty"], "is a directory"),
        (["--no-python", "nope"], "PATH has no program 'nope'"),
        (["--no-python", "run.sh"], "write ./run.sh for the file in this folder"),
        (["--no-python", ""], "PATH has no program ''"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_starts(argv, said):
    with pytest.raises(UsageError) as raised:
        parse(argv, {"PATH": "/nowhere"})
    assert said in str(raised.value)
