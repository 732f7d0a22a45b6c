"""The report as a file: what it says, that it is sound HTML, harmless, and never large."""

import json
import os

import pytest
from support.recorded_runs import BEGAN, Page, incident, kills, status, write

from msrun.report.report import report_at_end, write_report

MB = 1 << 20


def html_of(folder, record):
    path = folder / "report.html"
    write_report({"XDG_STATE_HOME": str(folder)}, record, path)
    return path.read_text()


def content(folder, record):
    """All but the last line, which says when the page was made."""
    return Page(html_of(folder, record)).text.rstrip().rpartition("\n")[0]


def reported(folder, lines, said, **more):
    return html_of(folder, write(folder, "20260101-000000-aaaaaa", lines, said, **more))


def killed(ranks=3, count=2, **changes):
    lines = list(kills(ranks, count))
    found = [line for line in lines if line["event"] == "IncidentOver"]
    known = [{name: line[name] for name in incident(0, 0, 0, 0)} for line in found]
    return lines, status("20260101-000000-aaaaaa", ranks, known, **changes)


def test_it_says_what_happened_and_what_it_cost(tmp_path):
    page = Page(reported(tmp_path, *killed()))
    for words in (
        "msrun report: train.py",
        "succeeded",
        "98.7 %",
        "rank 0 was killed by SIGKILL",
        "rank 1 was killed by SIGKILL",
        "replaced",
        "310 ms",
        "frozen, waits for a lost rank",
        "a rank failed",
    ):
        assert words in page.text
    assert page.texts.count("training") == 1  # in the legend
    assert "starting" in page.text and "stopping" not in page.texts


def test_what_torchrun_would_have_lost_is_computed_from_the_runs_own_incidents(tmp_path):
    page = Page(reported(tmp_path, *killed()))
    at = page.texts.index("torchrun, a checkpoint every N = 1000 steps")
    # steps 101 and 201: 100 and 200 again; 1.002 s to start, 21 ms a step
    assert page.texts[at + 1 : at + 3] == ["300", "8.3 s"]
    assert "torchrun, a checkpoint every N = 100 steps" in page.texts
    at = page.texts.index("torchrun, a checkpoint every N = 100 steps")
    assert page.texts[at + 1 : at + 3] == ["0", "2 s"]
    assert "For each incident: the time that this run needed" in page.text


def test_nothing_of_the_run_is_taken_for_html(tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\ud800\x1b]0;x\x07"
    lines, said = killed(reason=bad)
    lines[-2] = {**lines[-2], "event": "JobStandsStill", "reason": bad}
    for each in (*(line for line in lines if line["event"] == "IncidentOver"), *said["incidents"]):
        each["cause"] = bad
    record = write(
        tmp_path, "20260101-000000-aaaaaa", lines, said, argv=("msrun", f"{bad}.py", bad)
    )
    logs = tmp_path / "logs/20260101-000000-aaaaaa"
    (logs / "worker_0.attempt_0.log").write_text(f"{bad[:40]}\nlast words\n")
    failure = {"rank": bad, "reason": bad, "hint": bad, "traceback": bad}
    (logs / "failure.json").write_text(json.dumps({"root": failure}))
    html = html_of(tmp_path, record)
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert page.text.count("<script>alert(1)</script>") >= 7
    assert "last words" in page.text
    assert "\x1b" not in html and "\x07" not in html


def test_a_pipe_in_a_logs_place_is_not_waited_for(tmp_path):
    record = write(tmp_path, "20260101-000000-aaaaaa", *killed())
    os.mkfifo(tmp_path / "logs/20260101-000000-aaaaaa/worker_0.attempt_0.log")
    assert "rank 0 was killed by SIGKILL" in Page(html_of(tmp_path, record)).text


def test_it_needs_nothing_from_elsewhere(tmp_path):
    html = reported(tmp_path, *killed())
    assert not {"src", "href", "url"} & {name for name, _ in Page(html).attributes}
    assert (
        "url(" not in html
        and "@import" not in html
        and "http" not in html.replace("http-equiv", "")
    )
    assert "default-src" in html and "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(("ranks", "count"), [(1000, 45), (8, 4000)])
def test_a_large_run_makes_no_large_page(tmp_path, ranks, count):
    lines, said = killed(ranks, count)
    assert len(lines) > 40_000
    html = reported(tmp_path, lines, said)
    assert len(html) < MB
    page = Page(html)
    assert page.tags.count("tr") < 150
    if ranks == 1000:
        assert "more ranks are not drawn" in page.text
    else:
        assert "The newest 100; events.jsonl has all of them." in page.text


def test_a_run_that_was_resumed_is_shown_after_it(tmp_path):
    lines, said = killed()
    write(tmp_path, "20260101-000000-aaaaaa", lines, said)
    later = status("20260102-000000-bbbbbb", 3, state="running")
    record = write(
        tmp_path, "20260102-000000-bbbbbb", [], later, lineage=("20260101-000000-aaaaaa",)
    )
    page = Page(html_of(tmp_path, record))
    assert "The run before it: 20260101-000000-aaaaaa" in page.text
    assert "lost" in page.texts  # the state of a run whose msrun is gone
    assert "No events are recorded" in page.text


def test_a_run_that_was_lost_is_drawn_until_the_last_that_is_known(tmp_path):
    lines, _ = killed(3, 1)
    said = status("20260101-000000-aaaaaa", 3, state="running", ended=None, updated=BEGAN + 3600)
    page = Page(reported(tmp_path, lines[:-6], said))
    assert "59 min 59 s" in page.texts
    assert "lost" in page.texts


def test_damaged_and_foreign_lines_are_left_out(tmp_path):
    lines, said = killed()
    record = write(tmp_path, "20260101-000000-aaaaaa", lines, said)
    events = tmp_path / "logs/20260101-000000-aaaaaa/events.jsonl"
    whole = content(tmp_path, record)
    odd = ['{"time": "x", "event": "GoOn"}', "[]", "nonsense", '{"event": "GoOn"}', '{"time": 1795000001, "event": "IncidentOver"}', '{"time": 1795000001, "event": "StepsTimed", "ranks": [0], "median_s": []}']  # fmt: skip
    kept = events.read_text().splitlines()
    events.write_text("\n".join([*kept[:5], *odd, *kept[5:], kept[-1][:20]]))
    assert content(tmp_path, record) == whole


def test_without_any_record_of_it_the_page_says_so(tmp_path):
    page = Page(reported(tmp_path, [], None))
    assert "No events are recorded" in page.text


def test_a_hung_rank_shows_where_it_stood(tmp_path):
    lines, said = killed()
    hung = next(line for line in lines if line["event"] == "IncidentOver")
    hung["kind"] = "hung"
    stacks = {"0": ["main", "in sleep()"], "1": ["main", "in all_reduce"]}
    judged = {"time": hung["at"] + 2, "event": "HangJudged", "culprits": [0], "victims": [1], "stacks": stacks}  # fmt: skip
    earlier = {**judged, "time": hung["at"] - 5, "stacks": {"0": ["elsewhere"]}}
    said["incidents"] = []
    page = Page(reported(tmp_path, [*lines, earlier, judged], said))
    assert "Where rank 0 stood:" in page.text and "in sleep()" in page.text
    assert "in all_reduce" in page.text and "elsewhere" not in page.text


def test_secrets_of_the_command_line_stay_out(tmp_path):
    argv = ("msrun", "t.py", "--api-key=abc123", "--token", "s3cret", "--data=s3://me:pw@host/x", "--tokens", "5")  # fmt: skip
    html = reported(tmp_path, *killed(), argv=argv)
    assert not [each for each in ("abc123", "s3cret", "me:pw") if each in html]
    assert "--tokens 5" in html and "--api-key=***" in html


def test_a_report_that_fails_says_so_and_ends_no_job(tmp_path):
    said = []

    class Listener:
        say = said.append

    report_at_end({"XDG_STATE_HOME": str(tmp_path)}, "nobody", tmp_path / "x.html", Listener)
    record = write(tmp_path, "20260101-000000-aaaaaa", *killed())
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    report_at_end(environ, record.record_id, tmp_path / "none/x.html", Listener)
    report_at_end(environ, record.record_id, tmp_path / "x.html", Listener)
    assert ["cannot be written" in each for each in said] == [True, True, False]
    assert said[2] == f"the report of this run is {tmp_path / 'x.html'}"
    assert (
        f"{BEGAN:.0f}" not in Page((tmp_path / "x.html").read_text()).text
    )  # times are for people
