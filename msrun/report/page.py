"""The report of a run, and of those that it resumed, as one HTML page without any other file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

from agent.accounting.summary import percent
from agent.records.run_record import without_secrets
from agent.text.ranges import format_ranges
from agent.text.wording import lasting, ranged
from msrun.report.evidence import MOST_RANKS, log_end, stacks
from msrun.report.lanes import lanes
from msrun.report.markup import Markup, joined, table, tag
from msrun.report.pace import lines, typical_s
from msrun.report.pictures import drawn_lanes, drawn_lines
from msrun.report.recording import Recording
from msrun.report.style import STYLE
from msrun.report.whole_restarts import whole_restarts
from msrun.runs.cost import PastIncident
from msrun.runs.status import script, uptime
from msrun.terminal.table import UNKNOWN, brief, moment

MOST_ROWS = 100  # incidents in the table, the newest
MOST_DETAILS = 12  # of those with logs and stacks
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
COLUMNS = ("after", "rank", "cause", "answer", "time lost", "steps lost", "step", "time")
FORMULA = (
    "For each incident: the time that this run needed from the start of its first process until "
    "all ranks trained ({start}), plus the steps since the last multiple of N times the median "
    "time of a step ({step}). A launcher that restarts all ranks loses at least that: torchrun "
    "starts slower than msrun, saving takes time as well, and a rank that hangs is noticed only "
    "when the time-out of the process group has passed (10 or 30 minutes)."
)


def page(chain: Sequence[Recording], now: float) -> str:
    """The whole page.

    Args:
        chain: the run, and before it those that it resumed, the oldest first.
        now: seconds since the epoch.
    """
    newest = chain[-1]
    shown = newest.record._replace(argv=without_secrets(newest.record.argv))
    title = f"msrun report: {os.path.basename(script(shown))}"
    body = [tag("h1", title), *_run(newest, now)]
    for earlier in reversed(chain[:-1]):
        body += [tag("h2", f"The run before it: {earlier.record.record_id}"), *_run(earlier, now)]
    body.append(tag("p", f"Written by msrun report at {moment(now)}.", class_="soft"))
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    html = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!doctype html>\n{html}\n"


def _run(found: Recording, now: float) -> Iterator[Markup]:
    run, record, timeline = found.run, found.record, found.timeline
    yield tag("p", f"Run {record.record_id}, started {moment(record.started)} in {record.cwd}")
    yield tag("pre", shlex.join(without_secrets(record.argv)))
    yield _headline(found, now)
    if run.status and run.status.reason:
        yield tag("p", f"Reason: {run.status.reason}")
    began, ended = timeline.first_start or timeline.began, timeline.ended
    if run.alive:
        ended = max(ended, now)
    elif run.status:  # of a run that was lost, the last that is known of it
        ended = max(ended, run.status.ended or run.status.updated)
    if began is None:
        yield tag("p", f"No events are recorded in {run.folder}: they were removed, or never kept.")
        return
    yield tag("h2", "Ranks")
    failures = [(one.at, one.ranks) for one in found.incidents]
    yield drawn_lanes(lanes(timeline.spans, failures, began, ended), began, ended)
    yield tag("p", "Each place shows what took most of its thousandth of the time.", class_="soft")
    if drawn := lines(found.paces, began, ended):
        yield tag("h2", "Time of a step")
        yield drawn_lines(drawn, began, ended)
        yield tag("p", "The median of the last steps before each note, at most 64.", class_="soft")
    yield from _incidents(found, began)
    yield from _compared(found)


def _headline(found: Recording, now: float) -> Markup:
    run, status = found.run, found.run.status
    cards = [("state", run.state), ("duration", uptime(run, now))]
    if status:
        cost = status.cost
        share = "unknown" if cost is None or cost.share is None else percent(cost.share)
        cards.append(("goodput: share that was training", share))
        steps = [worker.step for worker in status.workers if worker.step is not None]
        cards += [
            ("ranks", str(len(status.workers))),
            ("newest step", str(max(steps)) if steps else UNKNOWN),
            ("incidents", str(cost.incidents) if cost else UNKNOWN),
            ("ranks replaced", str(status.replaced)),
            ("restarts of all ranks", str(status.restarts)),
        ]
        if cost and cost.incidents:
            steps_lost = "unknown" if cost.lost_steps is None else str(cost.lost_steps)
            seconds = "unknown" if cost.lost_s is None else brief(cost.lost_s)
            cards += [("steps lost", steps_lost), ("time lost", seconds)]
    shown = (tag("div", tag("b", value), tag("span", name), class_="card") for name, value in cards)
    return tag("div", *shown, class_="cards")


def _incidents(found: Recording, began: float) -> Iterator[Markup]:
    yield tag("h2", "Incidents")
    if not found.incidents:
        yield tag("p", "None.")
    else:
        known = found.incidents[-MOST_ROWS:]
        if len(known) < len(found.incidents):
            yield tag("p", f"The newest {len(known)}; events.jsonl has all of them.")
        yield table(COLUMNS, [_row(one, began) for one in known])
        told: set[str] = set()
        for one in known[-MOST_DETAILS:]:
            yield from _detail(found, one, told)
    for at, why in found.stills[-MOST_DETAILS:]:
        yield tag("p", f"{moment(at)}: {why}")
    yield from _final(found)


def _row(one: PastIncident, began: float) -> tuple[object, ...]:
    return (
        tag("div", lasting(one.at - began), class_="when"),
        format_ranges(one.ranks) or UNKNOWN,
        tag("div", one.cause, class_="cause"),
        one.answer or UNKNOWN,
        tag("div", brief(one.lost_s), class_="when"),
        UNKNOWN if one.lost_steps is None else one.lost_steps,
        UNKNOWN if one.step is None else one.step,
        tag("div", moment(one.at), class_="when"),
    )


def _detail(found: Recording, one: PastIncident, told: set[str]) -> Iterator[Markup]:
    """The logs and stacks of an incident, if there are any that were not ``told`` before."""
    parts = []
    for rank, stack in stacks(found, one).items():
        parts += [tag("p", f"Where rank {rank} stood:"), tag("pre", stack)]
    for rank in one.ranks[:MOST_RANKS]:
        if (end := log_end(found, rank, one.attempt)) and end not in told:
            told.add(end)
            parts += [tag("p", f"The end of what rank {rank} printed:"), tag("pre", end)]
    if parts:
        yield tag("h3", f"{moment(one.at)}: {ranged(one.ranks)}")
        yield joined(*parts)


def _final(found: Recording) -> Iterator[Markup]:
    """The report of a failed job."""
    root = found.failure.get("root")
    if not isinstance(root, dict):
        return
    yield tag("h3", f"Why the job failed: rank {root.get('rank')}")
    for text in (root.get("reason"), root.get("hint")):
        if text:
            yield tag("p", text)
    if said := root.get("traceback") or root.get("message"):
        yield tag("pre", said)


def _compared(found: Recording) -> Iterator[Markup]:
    """What a restart of all ranks at each incident would have cost."""
    answered = [one for one in found.incidents if one.step is not None]
    if not answered:
        return
    start_s, step_s = found.timeline.start_s, typical_s(found.paces)
    yield tag("h2", "The same incidents under torchrun")
    steps = [one.step for one in answered if one.step is not None]
    cost = found.run.status.cost if found.run.status else None
    rows: list[tuple[object, ...]] = [
        (
            f"torchrun, a checkpoint every N = {each.interval} steps",
            each.steps,
            "unknown" if each.seconds is None else brief(each.seconds),
        )
        for each in whole_restarts(steps, start_s, step_s)
    ]
    lost_steps = UNKNOWN if cost is None or cost.lost_steps is None else cost.lost_steps
    rows.append(("msrun, this run", lost_steps, brief(cost.lost_s if cost else None)))
    yield table(("", "steps trained again", "time lost"), rows)
    said = FORMULA.format(start=brief(start_s), step=brief(step_s))
    left = len(found.incidents) - len(answered)
    if left:
        said += f" Left out: {left} incidents of which the step is not known."
    yield tag("p", said, class_="soft")
