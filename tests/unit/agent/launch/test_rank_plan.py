"""The launch plan: each rank's command, environment and files, as they are started and printed."""

import sys
from pathlib import Path

import pytest

from agent.launch.rank_plan import (
    ORDER_BYTES,
    Binding,
    check_orders,
    command,
    job_env,
    plan_ranks,
    streams,
)
from agent.spec.device_plan import DevicePlan
from agent.spec.job_spec import (
    CopyMode,
    DumpSpec,
    JobSpec,
    LogSpec,
    Program,
    ProgramKind,
    Std,
    UsageError,
)
from agent.workers.order_batches import order_bytes
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import StartWorkers
from worker_hooks.contract.wire import PACKET_BYTES, encode


def spec(*args, kind=ProgramKind.SCRIPT, name="train.py", python="/usr/bin/python3", **changes):
    program = Program(name, args, kind, python)
    return JobSpec(
        **{"program": program, "nproc": 2, "run_id": "job", "record_id": "rec", **changes}
    )


def layout(tree=False):
    return RunLayout(Path("/l"), "rec", "job", torchrun_tree=tree)


@pytest.mark.parametrize(
    ("job", "argv"),
    [
        (spec(), ("/usr/bin/python3", "-u", "train.py")),
        (spec("--lr", "0.1"), ("/usr/bin/python3", "-u", "train.py", "--lr", "0.1")),
        (
            spec("a", kind=ProgramKind.MODULE, name="pkg.train"),
            ("/usr/bin/python3", "-u", "-m", "pkg.train", "a"),
        ),
        (spec("a", kind=ProgramKind.PROGRAM, name="./run.sh"), ("./run.sh", "a")),
        (spec("-c", "", " ", python="py"), ("py", "-u", "train.py", "-c", "", " ")),
    ],
)
def test_a_command_line(job, argv):
    assert command(job, 0) == argv


def test_run_path_runs_the_file_as_main_with_its_own_arguments(tmp_path, monkeypatch, capsys):
    script = tmp_path / "a script.py"
    script.write_text("import sys; print([__name__, *sys.argv])")
    job = spec("--x", "1", kind=ProgramKind.RUN_PATH, name=str(script), python="py")
    *options, code, name, first, second = command(job, 0)
    monkeypatch.setattr(sys, "argv", ["-c", name, first, second])
    exec(code, {})
    assert options == ["py", "-u", "-c"]
    assert capsys.readouterr().out == f"{['__main__', str(script), '--x', '1']}\n"


@pytest.mark.parametrize(
    ("given", "local_rank", "shown"),
    [
        ("--gpu=${local_rank}", 1, "--gpu=1"),
        ("$local_rank", 12, "12"),
        ("${local_rank}${local_rank}", 3, "33"),
        ("$$HOME", 0, "$HOME"),
        ("$${local_rank}", 0, "${local_rank}"),
        ("${rank}", 0, "${rank}"),
        ("$", 0, "$"),
        ("100%", 0, "100%"),
        ("{local_rank}", 0, "{local_rank}"),
        ("${local_rank", 0, "${local_rank"),
    ],
)
def test_the_local_rank_is_filled_in_as_torchrun_does(given, local_rank, shown):
    assert command(spec(given), local_rank)[-1] == shown


def test_the_programs_name_may_tell_the_ranks_apart():
    assert command(spec(name="${local_rank}.py"), 1)[-1] == "1.py"


def test_every_rank_of_a_node_is_planned_in_both_dialects():
    orders = plan_ranks(spec(nproc=3), layout(), 1, {}, ())
    assert [order.rank for order in orders] == [0, 1, 2]
    assert orders[2].environ == {
        "RANK": "2",
        "ROLE_RANK": "2",
        "LOCAL_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_ERROR_FILE": "/l/errors/attempt_1/2.json",
        "MS_NODE_ID": "2",
        "RANK_ID": "2",
        "DEVICE_ID": "2",
    }


def test_the_second_nodes_ranks_follow_the_firsts():
    orders = plan_ranks(spec(nodes=(3, 2), node_rank=1), layout(), 0, {}, ())
    assert [(o.rank, o.environ["RANK"], o.environ["LOCAL_RANK"], o.stdout) for o in orders] == [
        (3, "3", "0", "/l/worker_3.log"),
        (4, "4", "1", "/l/worker_4.log"),
    ]


def test_what_all_are_told_follows_the_job():
    job = spec(
        nodes=(3, 2),
        node_rank=1,
        max_restarts=3,
        master_addr="h",
        role="r",
        rank_table_file="/t",
        signals=("SIGTERM",),
    )
    told = job_env(job, 1234)
    assert (told.world_size, told.local_world_size, told.group_rank, told.group_world_size) == (
        5,
        2,
        1,
        2,
    )
    assert (told.run_id, told.master_addr, told.master_port, told.max_restarts) == (
        "job",
        "h",
        1234,
        3,
    )
    assert (told.role, told.rank_table_file, told.signals) == ("r", "/t", ("SIGTERM",))


def test_with_a_virtual_local_rank_each_sees_its_own_device():
    orders = plan_ranks(
        spec(virtual_local_rank=True), layout(), 0, {"CUDA_VISIBLE_DEVICES": "4,6"}, ()
    )
    shown = [
        (o.environ["LOCAL_RANK"], o.environ["CUDA_VISIBLE_DEVICES"], o.environ["RANK"])
        for o in orders
    ]
    assert shown == [("0", "4", "0"), ("0", "6", "1")]


def lists(devices=(), inherited="0, 1,2", **changes):
    """What CUDA_VISIBLE_DEVICES each of two ranks is given; ``None``: it inherits msrun's."""
    environ = {"CUDA_VISIBLE_DEVICES": inherited}
    orders = plan_ranks(spec(**changes), layout(), 0, environ, (), devices=devices)
    return [order.environ.get("CUDA_VISIBLE_DEVICES") for order in orders]


def test_ranks_inherit_their_devices_as_long_as_none_has_failed():
    assert set(lists()) == set(lists(("0", "1", "2"))) == {None}


def test_ranks_that_start_later_see_the_list_that_was_decided():
    assert set(lists(("0", "2"))) == {"0,2"}


def test_ranks_of_a_resumed_run_begin_without_the_devices_that_failed():
    plan = DevicePlan({0: "0", 1: "2"}, given_up=("1",))
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    orders = plan_ranks(spec()._replace(devices=plan), layout(), 0, environ, ())
    assert {order.environ["CUDA_VISIBLE_DEVICES"] for order in orders} == {"0,2"}


def test_with_a_virtual_local_rank_the_only_device_is_another_one():
    assert lists(("0", "2"), virtual_local_rank=True)[:2] == ["0", "2"]
    assert lists(virtual_local_rank=True)[:2] == ["0", "1"]


def test_with_a_virtual_local_rank_the_arguments_still_tell_the_ranks_apart():
    orders = plan_ranks(spec("${local_rank}", virtual_local_rank=True), layout(), 0, {}, ())
    assert [order.argv[-1] for order in orders] == ["0", "1"]


def test_too_few_devices_for_virtual_local_ranks_are_refused():
    with pytest.raises(UsageError, match="lists 1 for 2 workers"):
        plan_ranks(spec(virtual_local_rank=True), layout(), 0, {"CUDA_VISIBLE_DEVICES": "4"}, ())


PLAIN = "/l/worker_1.log"
TREE = "/l/job_rec/attempt_2/1"


@pytest.mark.parametrize(
    ("logs", "stdout", "stderr"),
    [
        (LogSpec(), PLAIN, PLAIN),
        (LogSpec(disabled=True), "", ""),
        (LogSpec(disabled=True, redirects={1: Std.ALL}), "", ""),
        (LogSpec(redirects={0: Std.ALL}), PLAIN, PLAIN),
        (LogSpec(redirects={1: Std.NONE}), PLAIN, PLAIN),
        (LogSpec(redirects={1: Std.OUT}), f"{TREE}/stdout.log", PLAIN),
        (LogSpec(redirects={1: Std.ERR}), PLAIN, f"{TREE}/stderr.log"),
        (LogSpec(redirects={1: Std.ALL}), f"{TREE}/stdout.log", f"{TREE}/stderr.log"),
        (LogSpec(tee={1: Std.ALL}), f"{TREE}/stdout.log", f"{TREE}/stderr.log"),
        (
            LogSpec(redirects={1: Std.OUT}, tee={1: Std.ERR}),
            f"{TREE}/stdout.log",
            f"{TREE}/stderr.log",
        ),
    ],
)
def test_where_a_ranks_output_goes(logs, stdout, stderr):
    out = streams(spec(logs=logs), layout(logs.torchrun_tree), attempt=2, local_rank=1)
    assert (out.stdout, out.stderr) == (stdout, stderr)


def test_the_error_file_lies_in_torchruns_tree_when_there_is_one():
    job = spec(logs=LogSpec(tee={1: Std.ALL}))
    orders = plan_ranks(job, layout(tree=True), 0, {}, ())
    assert orders[1].environ["TORCHELASTIC_ERROR_FILE"] == "/l/job_rec/attempt_0/1/error.json"


def test_without_files_there_is_no_error_file():
    orders = plan_ranks(spec(logs=LogSpec(disabled=True)), layout(), 0, {}, ())
    assert {order.environ["TORCHELASTIC_ERROR_FILE"] for order in orders} == {""}


def test_bindings_go_to_their_ranks():
    bindings = (Binding(cpus=(0, 1)), Binding(cpus=(2,)))
    orders = plan_ranks(spec(), layout(), 0, {}, bindings)
    assert [order.cpus for order in orders] == [(0, 1), (2,)]


def test_attempts_differ_only_in_what_they_are_told_about_themselves():
    first, second = (plan_ranks(spec("x"), layout(), attempt, {}, ())[0] for attempt in (0, 1))
    changed = {name for name in first.environ if first.environ[name] != second.environ[name]}
    assert changed == {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"}
    assert second._replace(environ=first.environ) == first


@pytest.mark.parametrize("kind", ProgramKind)
def test_a_rank_that_goes_on_from_a_checkpoint_is_told_so_at_the_end(kind):
    job = spec("--lr=1", kind=kind, dump=DumpSpec(recover_arg="--is_recover=1"))
    assert command(job, 0, resumes=True) == (*command(job, 0), "--is_recover=1")


@pytest.mark.parametrize(
    ("args", "word"),
    [(("--is_recover=1",), "--is_recover=1"), (("x",), ""), (("x",), None), (("go", "on"), "go")],
)
def test_a_rank_is_told_once_or_not_at_all(args, word):
    job = spec(*args)._replace(dump=DumpSpec(recover_arg=word))
    assert command(job, 0, resumes=True) == command(job, 0)


def test_the_hooks_socket_is_told_if_there_is_one():
    assert "MSRUN_HOOKS" not in job_env(spec(), 29500).environ({}, "rec")
    assert job_env(spec(), 29500, "msrun-x").environ({}, "rec")["MSRUN_HOOKS"] == "msrun-x"


@pytest.mark.parametrize(
    ("dump", "nodes", "told"),
    [
        (DumpSpec(), (2,), "auto"),
        (DumpSpec(), (2, 2), ""),
        (DumpSpec(after_failure=False), (2,), ""),
        (DumpSpec(copies=CopyMode.LIVE, after_failure=False), (2,), "live"),
        (DumpSpec(copies=CopyMode.LIVE), (2, 2), ""),
        (DumpSpec(copies=CopyMode.COPY), (2,), ""),
        (DumpSpec(copies=CopyMode.OFF), (2,), ""),
    ],
)
def test_whether_memory_is_to_outlive_ranks_follows_what_would_be_done_with_it(dump, nodes, told):
    env = job_env(spec(nodes=nodes, master_addr="h", dump=dump), 29500, "msrun-x")
    assert env.environ({}, "rec").get("MSRUN_KEEPS_MEMORY", "") == told


def test_an_order_that_fits_no_message_is_refused_by_rank():
    short, long = plan_ranks(spec("x"), layout(), 0, {}, ())
    check_orders([short, long._replace(argv=("x" * (ORDER_BYTES - 2000),))])
    with pytest.raises(UsageError, match=r"command line of rank 1 is too long .*in a file$"):
        check_orders([short, long._replace(argv=("x" * ORDER_BYTES,))])


def test_an_order_that_is_not_refused_fits_a_message():
    order = plan_ranks(spec(), layout(), 0, {}, ())[0]
    full = order._replace(argv=("x" * (ORDER_BYTES - order_bytes(order._replace(argv=("",)))),))
    check_orders([full])
    assert len(encode(StartWorkers(10**100, (full,)))) <= PACKET_BYTES
