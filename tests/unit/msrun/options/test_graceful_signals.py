"""Options of a graceful exit: on the command line, in a file, in the environment; and wrong ones."""

import signal

import pytest

from agent.launch.signals import graceful, passed_on, stops
from agent.spec.job_spec import UsageError
from msrun.job.request import parse

SCRIPT = ["train.py"]


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def job(*words, **environ):
    return parse([*words, *SCRIPT], environ).job


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ("SIGUSR1", (10,)),
        ("USR1, usr2", (10, 12)),
        ("12,SIGUSR2,12", (12,)),
        ("40", (40,)),  # a real-time signal has no name
        ("", ()),
        ("SIGTERM", (15,)),
    ],
)
def test_signals_by_name_or_number(said, numbers):
    assert job(f"--graceful_signals={said}").graceful_signals == numbers
    assert job(PET_GRACEFUL_SIGNALS=said).graceful_signals == numbers


def test_a_file_may_list_them(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "graceful_signals: [SIGUSR1, 12]\ngrace: 45\ngraceful_exit_file: exit.json\n"
    )
    made = job("--config=job.yaml")
    assert made.graceful_signals == (10, 12)
    assert (made.timeouts.exit_s, made.timeouts.asked_exit_s) == (45, 45)
    assert made.exit_file == tmp_path / "exit.json"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("KILL", "no program can catch KILL"),
        ("10,SIGSTOP", "no program can catch SIGSTOP"),
        ("SIGFOO", "SIGFOO is not a signal of this system"),
        ("-1", "-1 is not a signal"),
        ("1.5", "1.5 is not a signal"),
        ("\u00b2", "is not a signal"),
        ("0", "0 is not a signal"),
        ("CHLD", "msrun needs CHLD"),
        ("SIGSEGV", "SIGSEGV means that a program crashed"),
    ],
)
def test_signals_that_can_ask_for_nothing(said, words):
    with pytest.raises(UsageError) as raised:
        job(f"--graceful_signals={said}")
    assert words in str(raised.value)
    assert str(raised.value).startswith("--graceful_signals=")


def test_a_graceful_signal_is_nothing_else():
    spec = job("--graceful_signals=USR1,INT")
    assert graceful(spec) == {signal.SIGUSR1, signal.SIGINT}
    assert signal.SIGINT not in stops(spec)
    assert passed_on(spec) == {signal.SIGUSR2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grace=0"], "must be above 0"),
        (["--grace=x"], "--grace=x is not a number"),
        (["--grace=nan"], "must be above 0"),
        (["--grace=5", "--freeze_timeout=5"], "--freeze_timeout=5 leaves no room within --grace=5"),
        (["--grace=30", "--scheduler_grace=20"], "leaves no room within --scheduler_grace=20"),
        (["--graceful_exit_file=."], "is a folder"),
    ],
)
def test_what_cannot_be_meant(words, said):
    with pytest.raises(UsageError) as raised:
        job(*words)
    assert said in str(raised.value)
