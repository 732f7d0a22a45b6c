"""msrun reads a command line as torchrun's own parser does."""

from __future__ import annotations

import contextlib
import io

import pytest

from agent.spec.job_spec import UsageError
from msrun.options.argv import _match, scan
from msrun.options.table import OptionOrigin

pytestmark = pytest.mark.torch

ACCEPTED = [
    ["t.py"],
    ["t.py", "a", "-b", "--c=d", "-m", "--nproc-per-node", "9"],
    ["--nproc-per-node", "2", "--nnodes=1:2", "t.py"],
    ["--nproc_per_node=2", "t.py", "--", "x"],
    ["--nproc-per", "2", "t.py"],
    ["--redirect=3", "--stand", "--max-r", "4", "t.py"],
    ["-r3", "-t", "1:2,0:1", "t.py"],
    ["-r=3", "-t=2", "t.py"],
    ["-mr3", "mod"],
    ["-m", "mod", "-m"],
    ["--max-restarts", "1", "--max_restarts", "2", "t.py"],
    ["--node-rank", "-1", "t.py"],
    ["--role", "-a b", "t.py"],
    ["--role=", "t.py"],
    ["--role", "", "t.py"],
    ["--role=--x", "t.py"],
    ["--role", "-", "t.py"],
    ["--", "t.py", "a"],
    ["--", "--weird.py", "a"],
    ["--", "t.py", "--", "a"],
    ["t.py", "--", "a", "--", "b"],
    ["t.py", "--", "--", "a"],
    ["t.py", "a", "--", "b"],
    ["--standalone", "--", "t.py", "--role", "x"],
    ["-", "a"],
    ["", "a"],
    ["-5", "a"],
    ["-5.5", "a"],
    ["t.py", "--help"],
    ["--no-python", "--run_path", "--virtual-local-rank", "t.py"],
    ["--rdzv-conf", "a=1", "--rdzv_conf", "b=2", "t.py"],
    ["--monitor-interval", "0.5", "--shutdown-timeout", "7", "--master_port=0", "t.py"],
    ["--numa-binding", "node", "--logs-specs", "default", "--local-addr", "h", "t.py"],
    ["--duplicate-stdout-filters", "a,,b,c", "t.py"],
    ["--unknown with space", "x"],
]

REFUSED = [
    [],
    ["--"],
    ["--standalone"],
    ["--nope", "t.py"],
    ["--nproc_per-node", "2", "t.py"],
    ["--master", "x", "t.py"],
    ["--log", "x", "t.py"],
    ["-x", "t.py"],
    ["-nproc", "2", "t.py"],
    ["--standalone=1", "t.py"],
    ["-mx", "t.py"],
    ["-m=x", "t.py"],
    ["--role"],
    ["--role", "--", "t.py"],
    ["--role", "--standalone", "t.py"],
    ["--role", "-q", "t.py"],
    ["--role", "--mas", "t.py"],
]


@pytest.fixture(scope="module")
def torchrun():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def _theirs(parser, argv):
    """torchrun's namespace, or None when it refuses."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return vars(parser.parse_args(argv))
        except SystemExit:
            return None


def _ours(parser, argv):
    """The namespace as torchrun would hold it, from what msrun reads."""
    try:
        line = scan(argv)
    except UsageError:
        return None
    if line.script is None:
        return None
    found = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    for action in parser._actions:
        if action.dest in line.given:
            text = line.given[action.dest].text
            flag = action.nargs == 0
            found[action.dest] = True if flag else (action.type or str)(text)
    return found | {"training_script": line.script, "training_script_args": list(line.script_args)}


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_an_accepted_line_means_the_same(torchrun, argv):
    theirs = _theirs(torchrun, argv)
    assert theirs is not None
    assert _ours(torchrun, argv) == theirs


@pytest.mark.parametrize("argv", REFUSED, ids=" ".join)
def test_a_refused_line_is_refused(torchrun, argv):
    assert _theirs(torchrun, argv) is None
    assert _ours(torchrun, argv) is None


def test_every_option_of_torchrun_is_there_with_its_variable_and_kind(torchrun):
    for action in torchrun._actions:
        for spelling in action.option_strings:
            option, _, _ = _match(spelling)
            assert option.dest == action.dest
            assert option.origin is OptionOrigin.TORCHRUN
            assert (option.env is not None) == (type(action).__name__ in {"env", "check_env"})
            assert (not option.metavar) == (action.nargs == 0)


def test_every_abbreviation_torchrun_knows_means_the_same_here(torchrun):
    """Exhaustive: each prefix of each option, whatever options of our own begin alike."""
    checked = 0
    for action in torchrun._actions:
        for spelling in (name for name in action.option_strings if name.startswith("--")):
            for length in range(3, len(spelling) + 1):
                found = {known for known, _, _ in torchrun._get_option_tuples(spelling[:length])}
                if len(found) == 1:
                    assert _match(spelling[:length])[0].dest == action.dest
                    checked += 1
    assert checked > 300
