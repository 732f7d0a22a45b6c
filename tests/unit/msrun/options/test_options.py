"""The table of options, its help, and how a command line is read by it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from agent.spec.job_spec import UsageError
from msrun.commands import commands
from msrun.options.argv import scan
from msrun.options.help import help_text, short_help
from msrun.options.program import SUBCOMMANDS
from msrun.options.table import OPTIONS, SPELLINGS, Kind, Section


def _given(argv):
    return {dest: setting.text for dest, setting in scan(argv).given.items()}


def test_no_spelling_belongs_to_two_options():
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    assert len(spellings) == len(set(spellings)) == len(SPELLINGS)


def test_every_multi_word_option_has_both_spellings():
    for option in OPTIONS:
        if "-" in option.name:
            assert {f"--{option.name}", f"--{option.dest}"} <= set(option.spellings)


def test_every_option_has_one_sentence_in_one_section():
    for option in OPTIONS:
        assert option.help.endswith(".")
        assert isinstance(option.section, Section)
        assert (option.kind is Kind.FLAG) == (not option.metavar)


def test_no_secret_is_ever_typed():
    """Whoever is on the machine sees the words of a command line."""
    words = re.compile("token|pass(word|phrase)|secret")
    assert [each.name for each in OPTIONS if words.search(each.name)] == ["token-file"]
    for word in ("--server-password", "--client_password"):
        with pytest.raises(UsageError, match=word):
            scan([f"{word}=x", "t.py"])


@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_names_every_option_and_section_within_its_width(width):
    text = help_text(width)
    assert all(option.long in text for option in OPTIONS)
    assert all(f"{section.value}:" in text for section in Section)
    assert all(len(line) <= max(width, 96) for line in text.splitlines())


def test_the_short_help_fits_a_terminal_and_names_every_command():
    lines = short_help().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("usage: msrun")
    assert "--help-all" in lines[-1]
    assert all(any(line.startswith(f"msrun {name} ") for line in lines) for name in SUBCOMMANDS)
    assert sum(line.startswith("  -") for line in lines) == 10


def test_every_subcommand_has_its_line_of_help():
    assert SUBCOMMANDS.keys() == commands.commands.keys()


def test_every_option_is_shown_with_dashes():
    assert not [option.long for option in OPTIONS if "_" in option.long]


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from msrun.job.request import parse\n"
        "try:\n    parse(['--help'], {})\n"
        "except SystemExit as left:\n    assert left.code == 0\n"
        "heavy = {'torch', 'rich', 'yaml', 'click', 'asyncio', 'argparse', 'difflib', 'ctypes', 'socket'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--nproc-per-node", "2", "s"], {"nproc_per_node": "2"}),
        (["--nproc_per_node=2", "s"], {"nproc_per_node": "2"}),
        (["--nproc-per", "2", "s"], {"nproc_per_node": "2"}),
        (["--nproc", "2", "s"], {"nproc_per_node": "2"}),
        (["--redirect=3", "s"], {"redirects": "3"}),
        (["-r3", "s"], {"redirects": "3"}),
        (["-r", "3", "-t=1", "s"], {"redirects": "3", "tee": "1"}),
        (["-mr3", "s"], {"module": "1", "redirects": "3"}),
        (["--stand", "s"], {"standalone": "1"}),
        (["--max-r", "1", "--max_restarts=2", "s"], {"max_restarts": "2"}),
        (["--role=", "s"], {"role": ""}),
        (["--role=--x", "s"], {"role": "--x"}),
        (["--node-rank", "-1", "s"], {"node_rank": "-1"}),
        (["--role", "-a b", "s"], {"role": "-a b"}),
        (["--worker_n", "8", "s"], {"worker_num": "8"}),
        (["--worker-num", "8", "--local-worker", "8", "s"], {"worker_num": "8", "local_worker_num": "8"}),
        # ambiguous with an option of our own: torchrun's wins
        (["--m", "s"], None),
        (["--v", "s"], {"virtual_local_rank": "1"}),
        (["-v", "--re", "1", "s"], {"verbose": "1", "redirects": "1"}),
        (["-vr3", "s"], {"verbose": "1", "redirects": "3"}),
        (["--s", "s"], None),
        (["--l", "s"], None),
        (["--ro", "x", "s"], {"role": "x"}),
        (["--ru", "s"], {"run_path": "1"}),
        (["--local-r", "0", "s"], {"local_ranks_filter": "0"}),
        (["--si", "s"], {"signals_to_handle": "s"}),
        (["--bind", "s"], None),
        (["--dry", "s"], {"dry_run": "1"}),
    ],
)  # fmt: skip
def test_options_are_read_as_torchrun_reads_them(argv, given):
    if given is None:
        with pytest.raises(UsageError, match="ambiguous"):
            scan(argv)
    else:
        assert _given(argv) == given


@pytest.mark.parametrize(
    ("argv", "script", "args"),
    [
        (["t.py"], "t.py", ()),
        (["t.py", "-m", "--nproc-per-node", "2"], "t.py", ("-m", "--nproc-per-node", "2")),
        (["t.py", "--log", "x", "--help"], "t.py", ("--log", "x", "--help")),
        (["--", "t.py", "a"], "t.py", ("a",)),
        (["--", "--weird.py", "a"], "--weird.py", ("a",)),
        (["t.py", "--", "a"], "t.py", ("a",)),
        (["--", "t.py", "--", "a"], "t.py", ("--", "a")),
        (["t.py", "--", "--", "a"], "t.py", ("--", "a")),
        (["t.py", "a", "--", "b"], "t.py", ("a", "--", "b")),
        (["-", "a"], "-", ("a",)),
        (["-5", "a"], "-5", ("a",)),
        (["--standalone", "t.py"], "t.py", ()),
        ([], None, ()),
        (["--"], None, ()),
        (["--standalone"], None, ()),
    ],
)
def test_options_end_at_the_script_and_the_first_double_dash_goes(argv, script, args):
    line = scan(argv)
    assert (line.script, line.script_args) == (script, args)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nope", "s"], "unrecognized option --nope"),
        (["--nproc_per-node", "2", "s"], "did you mean --nproc-per-node?"),
        (["--master", "x", "s"], "it could match --master-addr, --master-port"),
        (["--log", "x", "s"], "it could match --log-dir, --logs-specs"),
        (["-x", "s"], "unrecognized option -x"),
        (["--standalone=1", "s"], "--standalone takes no value"),
        (["-mx", "s"], "-m takes no value"),
        (["-m=", "s"], "-m takes no value"),
        (["--role"], "--role needs a value"),
        (["--role", "--", "s"], "--role needs a value"),
        (["--role", "--standalone", "s"], "--role needs a value"),
        (["--role", "-q", "s"], "--role needs a value"),
    ],
)
def test_a_wrong_option_is_one_sentence(argv, said):
    with pytest.raises(UsageError) as raised:
        scan(argv)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "given", "script"),
    [
        (["--resume"], "", None),
        (["--resume", "run"], "run", None),
        (["--resume=run", "t.py"], "run", "t.py"),
        (["--resume=", "run"], "", "run"),
        (["--resume", "t.py"], "", "t.py"),
        (["--resume", "--", "run"], "", "run"),
        (["--resume", "--role", "run"], "", None),
        (["--res", "run", "t.py", "--resume"], "run", "t.py"),
    ],
)
def test_an_option_whose_value_may_be_missing_takes_only_what_fits(argv, given, script):
    line = scan(argv, lambda words: words[0] == "run")
    assert (line.given["resume"].text, line.script) == (given, script)


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (["--help"], "help"),
        (["--hel"], "help"),
        (["--help-all"], "help-all"),
        (["-h"], "help"),
        (["--standalone", "--version"], "version"),
        (["t.py", "--help"], None),
        (["--h"], "help"),
    ],
)
def test_help_and_version_are_answered_before_the_script_only(argv, printed):
    assert scan(argv).print_only == printed
