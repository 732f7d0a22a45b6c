"""What may follow on a command line; the shells that are installed really ask for it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msrun.commands import commands, run
from msrun.completion.words import Sources, candidates
from msrun.options.program import SUBCOMMANDS
from msrun.options.table import OPTIONS

RUNS = ("20260102-dead", "20260101-alive")
SOURCES = Sources(commands, lambda is_living: RUNS[1:] if is_living else RUNS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("train.py", "eval.py", "notes.txt", "job.yaml", ".hidden.py", "a b.py"):
        (tmp_path / name).touch()
    (tmp_path / "ckpts/inner").mkdir(parents=True)
    (tmp_path / "ckpts/more.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def after(line: str) -> list[str]:
    return candidates(
        [*shlex.split(line.removesuffix("|")), *([""] * line.endswith(" |"))], SOURCES
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta|", ["status"]),
        ("tr|", ["train.py"]),
        ("ckpts/|", ["ckpts/inner/", "ckpts/more.py"]),
        ("--worker-n|", ["--worker-num"]),
        ("--worker_n|", ["--worker_num"]),
        ("--worker-num |", []),
        ("--worker-num 8 t|", ["train.py"]),
        ("--worker-num=8 |", ["a b.py", "ckpts/", "eval.py", "train.py"]),
        ("--numa-binding |", ["node", "socket", "exclusive", "core-complex"]),
        ("--numa-binding=s|", ["--numa-binding=socket"]),
        ("--join F|", ["False"]),
        ("--config j|", ["job.yaml"]),
        ("--log-dir |", ["ckpts/"]),
        ("--resume |", [*RUNS, "ckpts/", "a b.py", "eval.py", "train.py"]),
        ("--resume=2|", [f"--resume={run}" for run in RUNS]),
        ("--resume = 20260102|", ["--resume=20260102-dead"]),
        ("--strict --rdzv-|", ["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"]),
        ("train.py n|", ["notes.txt"]),
        ("train.py --ep|", []),
        ("-m train.py j|", ["job.yaml"]),
        ("status |", list(RUNS)),
        ("stop |", list(RUNS[1:])),
        ("stop --no|", ["--now"]),
        ("stop --grace |", []),
        ("logs 20260102-dead |", []),
        ("logs -f 20260101|", ["20260101-alive"]),
        ("checkpoints ve|", ["verify"]),
        ("checkpoints ck|", ["ckpts/"]),
        ("checkpoints verify |", ["ckpts/"]),
        ("checkpoints prune --ke|", ["--keep"]),
        ("doctor |", ["ckpts/"]),
        ("help |", ["protect"]),
        ("completion f|", ["fish"]),
        ("drill --ki|", ["--kill"]),
        ("drill -- --worker-num=2 tr|", ["train.py"]),
    ],
)  # fmt: skip
def test_what_may_follow(line, found):
    assert after(line) == found


@pytest.mark.usefixtures("folder")
def test_at_the_beginning_there_are_commands_and_scripts():
    assert candidates([""], SOURCES)[: len(SUBCOMMANDS)] == list(SUBCOMMANDS)
    assert "train.py" in candidates([""], SOURCES)
    assert candidates([], SOURCES) == candidates([""], SOURCES)
    assert {option.long for option in OPTIONS} < {*after("-|")}


def test_nothing_heavy_is_imported_for_a_key_press():
    code = (
        "import sys\nfrom msrun.commands import run\n"
        "assert run(['completion', 'words', '--', 'sta']) == 0\n"
        "assert not {'torch', 'rich', 'yaml', 'asyncio'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("status\n", "")


# --- real shells -----------------------------------------------------------------------------------

PROGRAM = str(Path(sys.executable).parent / "msrun")
BASH = """
eval "$("$MSRUN" completion bash)"
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1))
_msrun
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p msrun >&2
"""
ZSH = """
compadd() {{ [[ $1 == -S ]] && shift 2; shift; (( $# )) && print -rl -- "$@"; return 0 }}
eval "$("$MSRUN" completion zsh)"
words=({words}) CURRENT={count}
_msrun
"""
FISH = """
set -p PATH (dirname $MSRUN)
$MSRUN completion fish | source
complete -C {line} | string split -f 1 \\t
"""


def ask(shell: str, words: list[str]) -> list[str]:
    """What a real shell offers for the last of these words."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    template = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    line = shlex.quote(" ".join(["msrun", *words]))
    quoted = " ".join(shlex.quote(word) for word in [PROGRAM, *words])
    text = template.format(words=quoted, count=len(words) + 1, line=line)
    environ = {**os.environ, "MSRUN": PROGRAM, "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [program, *flags, "-c", text], env=environ, capture_output=True, text=True, check=False
    )
    if shell == "bash":
        assert "complete -F _msrun msrun" in done.stderr
    return [word for word in done.stdout.splitlines() if word]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sta"], {"status"}),
        (["--worker-n"], {"--worker-num"}),
        (["tra"], {"train.py"}),
        (["ckp"], {"ckpts/"}),
        (["stop", "--no"], {"--now"}),
        (["--numa-binding", ""], {"node", "socket", "exclusive", "core-complex"}),
        (["nothing-like-it"], set()),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, list) else "",
)
def test_a_real_shell_offers_it(shell, words, found):
    assert {*ask(shell, words)} == found


@pytest.mark.usefixtures("folder")
def test_bash_gets_what_follows_an_equals_sign_alone_and_quoted_names():
    assert ask("bash", ["--numa-binding", "=", "so"]) == ["socket"]
    assert {*ask("bash", ["--join", "="])} == {"True", "False"}
    assert ask("bash", ["a"]) == [r"a\ b.py"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(shell, capfd):
    assert run(["completion", shell]) == 0
    assert "completion words" in capfd.readouterr().out
