"""torchrun and accelerate launch hand their job over to msrun, with all of its options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from support.jobs import WORKERS, finished

from agent.spec.job_spec import UsageError
from msrun.launchers.torchrun import words_of

pytestmark = pytest.mark.torch

HERE = Path(sys.executable).parent
FUNCTION = """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="msrun", run_id="a"), print)()
"""
LINES = [
    "t.py a -b --c=d -m --nproc-per-node 9",
    "--nproc-per-node=2 --nnodes=1:2 t.py",
    "--nnodes 2 --node-rank 1 --rdzv-endpoint h:7 --rdzv-id j --rdzv-conf a=1,b=2 t.py",
    "--nnodes 2 --master-addr h --master-port 7 --local-addr g t.py",
    "-m -r 3 -t 1:2,0:1 --log-dir l --role x mod a",
    "--no-python --virtual-local-rank -- t.py -- x",
    "--run-path --max-restarts 3 --monitor-interval 0.5 --shutdown-timeout 7 /t.py",
    "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters d t.py",
    "--signals-to-handle SIGTERM --local-ranks-filter 0,1 --numa-binding node t.py",
    "--start-method fork --event-log-handler console --logs-specs default t.py",
    "-- --weird.py a",
]


@pytest.fixture(scope="module")
def torchrun():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@pytest.mark.parametrize("line", LINES)
def test_every_option_is_handed_over(torchrun, line):
    theirs = vars(torchrun.parse_args(["--rdzv-backend=msrun", *line.split()]))
    words = words_of(theirs, {})
    assert "--rdzv-backend=msrun" in words
    assert vars(torchrun.parse_args(list(words))) == theirs


def test_what_is_not_given_is_not_handed_over(torchrun):
    theirs = vars(torchrun.parse_args(["--rdzv-backend=msrun", "t.py"]))
    assert words_of(theirs, {}) == ("--rdzv-backend=msrun", "t.py")
    # torchrun's own default, which it sets later, and accelerate's
    theirs |= {"master_port": 29500, "module": None, "no_python": None, "log_dir": None}
    assert words_of(theirs, {}) == ("--rdzv-backend=msrun", "t.py")


def test_a_variable_is_handed_over_by_the_environment_unless_an_option_differs(torchrun):
    given = {"PET_ROLE": "x", "PET_MAX_RESTARTS": "2", "PET_RDZV_BACKEND": "msrun"}
    theirs = vars(torchrun.parse_args(["--role=x", "--max-restarts=0", "t.py"]))
    theirs["rdzv_backend"] = "msrun"
    assert words_of(theirs, given) == ("--max-restarts=0", "t.py")
    with pytest.raises(UsageError, match="PET_MODULE=1: unset it, as --module is not given"):
        words_of(theirs | {"module": False}, {"PET_MODULE": "1"})


def test_an_option_of_another_torchrun_is_refused_if_it_is_in_use(torchrun):
    theirs = vars(torchrun.parse_args(["t.py"]))
    assert words_of(theirs | {"new_one": False, "new_two": None}, {}) == ("t.py",)
    with pytest.raises(UsageError, match="msrun does not know torchrun's --new-one"):
        words_of(theirs | {"new_one": 3}, {})


def test_the_launcher_before_torchrun_gives_the_local_rank_as_an_argument():
    given = Namespace(use_env=False, training_script="t.py", training_script_args=["a"])
    assert words_of(vars(given), {}) == ("t.py", "--local-rank=${local_rank}", "a")


GIVEN = ["--rdzv-backend=msrun", "--nproc-per-node=2", "--max-restarts=1"]
TORCHRUN = [HERE / "torchrun"]
ACCELERATE = [
    *(HERE / "accelerate", "launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no"),
    *("--dynamo_backend=no", "--main_process_port=0", "--num_processes=2"),
    *("--rdzv_backend=msrun", "--max_restarts=1"),
]


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ([*TORCHRUN, *GIVEN], {}),
        ([sys.executable, "-m", "torch.distributed.run", *GIVEN], {}),
        ([*TORCHRUN, *GIVEN[1:]], {"PET_RDZV_BACKEND": "msrun"}),
        (ACCELERATE, {}),
    ],
    ids=["torchrun", "module", "variable", "accelerate"],
)
def test_the_ranks_are_msruns(msrun, words, environ):
    ended = finished(msrun, *words, WORKERS / "place.py", "a", "--", "-b", **environ)
    assert ended.code == 0, ended
    told = re.findall(r"^\[rank (\d)\]: place (.*)$", ended.out, re.MULTILINE)  # msrun's form
    assert sorted(rank for rank, _ in told) == ["0", "1"]
    for rank, text in told:
        place = json.loads(text)
        assert (place["RANK"], place["WORLD_SIZE"]) == (rank, "2")
        assert place["TORCHELASTIC_MAX_RESTARTS"] == "1"
        assert place["argv"] == ["a", "--", "-b"]
    assert len([*(msrun.tmp / "state/msrun/runs").glob("*/events.jsonl")]) == 1


def test_a_failure_is_the_commands(msrun):
    ended = finished(msrun, *TORCHRUN, *GIVEN[:2], WORKERS / "place.py", "exit=1:7")
    assert ended.code == 1, ended
    assert re.search(r"msrun: rank 1 .* exited with code 7", ended.err)


def test_msrun_itself_takes_the_variable_that_has_torchrun_hand_over(msrun):
    assert msrun.run(WORKERS / "place.py", PET_RDZV_BACKEND="msrun").code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [sys.executable, "-c", FUNCTION],
            "--rdzv-backend=msrun works in commands of torchrun and accelerate launch",
        ),
        ([*TORCHRUN, *GIVEN, "none.py"], "there is no script 'none.py'"),
        ([*TORCHRUN, *GIVEN, "--rdzv-endpoint=h:x", "t.py"], "the port must be a number"),
    ],
    ids=["function", "no script", "endpoint"],
)
def test_what_msrun_cannot_do_is_refused(msrun, words, sentence):
    ended = finished(msrun, *words)
    assert (ended.code, ended.out) == (2, "")
    said = [line for line in ended.err.splitlines() if line.startswith("msrun: error: ")]
    assert len(said) == 1, ended.err
    assert sentence in said[0]


def test_torch_loads_nothing_heavy_to_know_of_msrun():
    code = (
        "import sys; import torch.distributed.elastic.rendezvous as them; "
        "print('msrun' in them.rendezvous_handler_registry._registry, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_known, *modules = done.stdout.split()
    assert is_known == "True"
    ours = {
        each for each in modules if each.partition(".")[0] in {"msrun", "agent", "worker_hooks"}
    }
    assert ours == {"msrun", "msrun.launchers", "msrun.launchers.torchrun"}
