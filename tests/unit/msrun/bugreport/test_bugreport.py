"""What a report of a run holds, and what it must never hold."""

from __future__ import annotations

import json
import os
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from agent.records import run_record
from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from agent.text.secret_names import masked, secrets, without_secrets
from msrun.bugreport import command
from msrun.bugreport.archive import Archive, tail
from msrun.bugreport.command import ReportOrder, report
from msrun.runs.run_state import look

WORDS = ("msrun", "t.py", "--api-key=hunter22", "--token", "s3cret-word", "--lr", "0.1",
         "--url=https://me:pass1word@host/x")  # fmt: skip
SECRETS = ("hunter22", "s3cret-word", "pass1word")
MACHINE = {"worst": "ok", "findings": []}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--use-auth=true", "--token=None"], set()),  # no secrets, and in every text
        (["--api-key=abcd1"], {"abcd1"}),
        (["--api_key", "abcd1"], {"abcd1"}),
        (["--password", "--lr", "abcd1"], set()),
        (["WANDB_API_KEY=abcd1"], {"abcd1"}),
        (["model.auth.token=abcd1"], {"abcd1"}),
        (["--tokenizer=bert-base", "--max-tokens", "4096", "--pattern=abcd1"], set()),
        (["postgres://me:abcd1@host/x", "https://host:8080/x@y"], {"abcd1"}),
        (["--token=abc"], set()),
        (["token", "abcd1"], set()),
        (["--webhook", "https://h/T/B/x"], {"https://h/T/B/x"}),
        (["--webh=https://h/T/B/x"], {"https://h/T/B/x"}),
        (["PET_WEBHOOK=https://h/T/B/x"], {"https://h/T/B/x"}),
        (["--url=https://abcdefgh1234@h/x", "ssh://git@h/x"], {"abcdefgh1234"}),
        (["--url=https://alice@h/x"], set()),  # of a name only the place is masked
        (["https://h/x?a=1&token=abcd1&b=22222#c"], {"abcd1"}),
    ],
)
def test_what_looks_like_a_secret_in_a_command_line(words, found):
    assert secrets(words) == found


def test_secrets_are_masked_wherever_they_are():
    text = "--token s3cret then s3cret-longer, http://a:b@h"
    assert masked(text, frozenset({"s3cret", "s3cret-longer"})) == (
        "--token *** then ***, http://a:***@h"
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--web", "https://h/T/B/x", "t.py"], ["--web", "***", "t.py"]),
        (["--webhook=https://abcdefgh1234@h"], ["--webhook=***"]),
        (["--url=https://alice@h/x", "ssh://git@h/x"], ["--url=https://***@h/x", "ssh://git@h/x"]),
        (["--url", "https://h/?a=1&token=x&b=2"], ["--url", "https://h/?a=1&token=***&b=2"]),
        (["https://h/x@y?a=b@c"], ["https://h/x@y?a=b@c"]),
    ],
)
def test_a_command_line_for_others_has_no_secret_address(words, shown):
    assert list(without_secrets(words)) == shown


@pytest.mark.parametrize(
    "secret",
    [
        'pa"ss',
        "pa\\ss",
        "p\xe4ss",
        "p'a\"ss",
        "pa\nss",
        "pa\udcffss",
        "\U0001f511key",
        '"ss"',
        "''ss",
    ],
)
def test_a_secret_is_masked_in_all_its_spellings(secret):
    line = shlex.join(["msrun", f"--token={secret}"])
    texts = [
        secret,
        json.dumps([secret]),
        json.dumps([secret], ensure_ascii=False),
        repr([secret]),
        json.dumps({"log_tail": [repr([secret])]}),
        line,
        json.dumps(line),
        os.fsencode(secret).decode(errors="backslashreplace"),
    ]
    for text in texts:
        found = masked(text, frozenset({secret}))
        assert "***" in found and "ss" not in found.replace("msrun", ""), text
        assert "key" not in found


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with two ranks that has ended; what it printed names a secret of its command line."""
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    logs = tmp_path / "logs"
    logs.mkdir()
    workers = [
        {"rank": rank, "local_rank": rank, "pid": 9, "state": "failed", "attempt": 0, "exit": "",
         "log": str(logs / f"worker_{rank}.log"), "started": 1.0, "ended": 2.0}
        for rank in (0, 1)
    ]  # fmt: skip
    status = {
        "record_id": "r1", "host": "node", "state": "failed", "attempt": 0, "restarts": 0,
        "max_restarts": 0, "replaced": 0, "reason": "x", "started": 1.0, "updated": 2.0,
        "ended": 2.0, "stop_s": 1.0, "workers": workers,
    }  # fmt: skip
    (logs / "status.json").write_text(json.dumps(status))
    (logs / "scheduler.log").write_text(f"msrun r1: {list(WORDS)}\n")
    (logs / "events.jsonl").write_text('{"event": "Finish"}\n')
    (logs / "failure.json").write_text('{"log_tail": ["printed"]}')
    for rank in (0, 1):
        (logs / f"worker_{rank}.log").write_text(f"rank {rank} uses hunter22\n")
    made = Record("r1", "job", 2**22 + 1, 1, str(logs), WORDS, str(tmp_path), 1.0)
    made = made._replace(environ={"OMP_NUM_THREADS": "1"}, unrecorded=("AWS_SECRET",))
    run_record.write(run_record.writable_folder(environ), made)
    monkeypatch.chdir(tmp_path)
    found = look(run_record.find(environ, "r1"))
    assert found.status is not None
    return found


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive
        }


def made(run, *, has_logs=True) -> dict[str, str]:
    path = Path("report.tar.gz")
    assert report(run, ReportOrder(path, has_logs=has_logs), MACHINE) == 0
    return contents(path)


def test_all_that_is_known_is_in_it_and_no_secret(run, capfd):
    found = made(run)
    assert found.keys() == {
        "record.json", "doctor.json", "versions.json", "events.jsonl", "scheduler.log",
        "status.json", "failure.json", "logs/worker_0.log", "logs/worker_1.log",
    }  # fmt: skip
    assert not [name for name, text in found.items() if any(one in text for one in SECRETS)]
    assert found["logs/worker_1.log"] == "rank 1 uses ***\n"
    record = json.loads(found["record.json"])
    assert record["argv"][5:7] == ["--lr", "0.1"]
    assert record["unrecorded"] == ["AWS_SECRET"]
    assert json.loads(found["versions.json"])["msrun"]
    assert json.loads(found["doctor.json"]) == MACHINE
    out = capfd.readouterr().out
    assert "readable for you only" in out
    assert "the end of 2 logs of ranks, as the script printed them" in out


def test_an_address_that_an_earlier_version_recorded_is_masked(run):
    environ = {"PET_WEBHOOK": "https://h/T/B/x", "PET_MAX_RESTARTS": "3"}
    found = made(replace(run, record=run.record._replace(environ=environ)))
    assert "T/B/x" not in found["record.json"]
    assert json.loads(found["record.json"])["environ"]["PET_MAX_RESTARTS"] == "3"


def test_it_is_for_the_user_alone_and_replaces_nothing(run):
    made(run)
    assert Path("report.tar.gz").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir()) == ["logs", "report.tar.gz", "state"]
    with pytest.raises(UsageError, match=r"report\.tar\.gz exists: name another file"):
        made(run)
    assert sorted(os.listdir()) == ["logs", "report.tar.gz", "state"]


def test_without_logs_nothing_is_in_it_that_quotes_them(run, capfd):
    found = made(run, has_logs=False)
    assert found.keys() == {
        "record.json", "doctor.json", "versions.json", "events.jsonl", "status.json",
    }  # fmt: skip
    assert "logs/" not in capfd.readouterr().out


def test_links_and_pipes_are_left_out(run, tmp_path):
    logs = tmp_path / "logs"
    (tmp_path / "outside").write_text("private")
    (logs / "worker_0.log").unlink()
    (logs / "worker_0.log").symlink_to(tmp_path / "outside")
    (logs / "worker_1.log").unlink()
    os.mkfifo(logs / "worker_1.log")
    (logs / "events.jsonl").unlink()
    os.mkfifo(logs / "events.jsonl")
    assert made(run).keys() == {
        "record.json", "doctor.json", "versions.json", "scheduler.log", "status.json",
        "failure.json",
    }  # fmt: skip


def test_a_file_behind_a_linked_folder_is_outside(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "a.log").write_text("private")
    (tmp_path / "run" / "inner").symlink_to(tmp_path / "away")
    assert tail(tmp_path / "run" / "inner" / "a.log", tmp_path / "run", 99) is None
    (tmp_path / "run" / "b.log").write_text("ours")
    assert tail(tmp_path / "run" / "b.log", tmp_path / "run", 99) == "ours"
    assert tail(tmp_path / "run" / "none.log", tmp_path / "run", 99) is None


def test_only_the_end_of_a_long_log_is_taken(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LOG_BYTES", 10)
    monkeypatch.setattr(command, "LOGS_BYTES", 20)
    for rank in (0, 1):
        (tmp_path / "logs" / f"worker_{rank}.log").write_text(f"{'x' * 90}{rank:010}")
    found = made(run)
    assert found["logs/worker_0.log"] == "... 90 bytes are left out ...\n0000000000"
    assert "logs/worker_1.log" not in found


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    archive = Archive("x")
    archive.add("a", "b\udcff")
    with pytest.raises(UsageError, match=r"/none/x.tar.gz cannot be written \(No such file"):
        archive.write(tmp_path / "none" / "x.tar.gz")
