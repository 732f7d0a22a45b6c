"""One frame of ``msrun top``: facts in, lines out, none wider than the terminal. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.text import Text

from agent.text.sanitize import sanitized
from agent.text.wording import duration
from msrun.runs.cost import PastIncident
from msrun.terminal.table import STYLES
from msrun.top.columns import BLOCKS, CHART, GAP, Fitted, chart, fit, span, tallest
from msrun.top.facts import JobFacts, RankFacts
from msrun.top.view import TopView

KEYS = "q quit  j/k select  l log"
LOG_KEYS = "Esc back  j/k other ranks  q quit"
HEAD_LINES = 4  # at most, above the ranks: three of the job, one of titles
LEAST_TEXT = 20  # characters of a cause
OTHER = "yellow"  # of states that are neither healthy nor ends


def room(height: int) -> int:
    """How many ranks fit into a terminal of so many lines."""
    return max(1, height - HEAD_LINES - 1)


def table(job: JobFacts, width: int, blocks: str = BLOCKS) -> list[Text]:
    """Every rank, for output that cannot scroll; ``blocks``: characters of the chart, ascending."""
    lines = [*_head(job, width), *_rows(job.ranks, width, blocks, None)]
    return [_cut(line, width) for line in lines]


def screen(
    job: JobFacts, view: TopView, size: os.terminal_size, blocks: str = BLOCKS
) -> list[Text]:
    """The visible ranks, as many lines as the terminal has."""
    rows = job.ranks[view.top : view.top + room(size.lines)]
    lines = [
        *_head(job, size.columns),
        *_rows(rows, size.columns, blocks, view.selected - view.top),
    ]
    lines += [Text()] * (size.lines - 1 - len(lines))
    seen = f"ranks {rows[0].rank}-{rows[-1].rank}, {len(job.ranks)} in all" if rows else "no ranks"
    return [_cut(line, size.columns) for line in (*lines, _foot(KEYS, seen, size.columns))]


def log(
    job: JobFacts, view: TopView, size: os.terminal_size, path: str, tail: Sequence[str]
) -> list[Text]:
    """The end of the selected rank's log; ``tail``: its last lines, or why there are none."""
    space = max(1, size.lines - 2)
    lines = [Text(_line(line)) for line in tail[-space:]]
    lines += [Text()] * (space - len(lines))
    rank, where = job.ranks[view.selected].rank, _line(path)
    spare = size.columns - len(f"rank {rank}: ")
    if len(where) > spare:  # the end of a path says more
        where = f"…{where[len(where) - max(0, spare - 1) :]}"
    title = Text(f"rank {rank}: {where}", "bold")
    foot = _foot(LOG_KEYS, f"job {job.state}", size.columns)
    return [_cut(line, size.columns) for line in (title, *lines, foot)]


def _head(job: JobFacts, width: int) -> Iterator[Text]:
    history = job.history
    yield Text("  ").join(
        (
            Text(job.run, "bold"),
            Text(job.state, STYLES.get(job.state, OTHER)),
            Text(f"up {job.uptime}"),
            *([Text(job.shadows)] if job.shadows else []),
            Text(_line(os.path.basename(job.script)), "bold"),
        )
    )
    step = "no step yet" if job.step is None else f"step {job.step}"
    saved = "nothing saved" if job.checkpoint is None else f"saved step {job.checkpoint}"
    if job.checkpoint is None and job.resumed is not None:
        saved += f" since step {job.resumed}"
    yield Text("  ".join((step, saved, *job.counts)))
    if history.end and job.is_over:
        yield Text(_line(history.end), STYLES.get(job.state, OTHER))
    elif job.incident is not None:
        yield Text(_incident(job, job.incident, width), OTHER)


def _incident(job: JobFacts, incident: PastIncident, width: int) -> str:
    """When it happened, why, and what was done about it; a long cause is cut."""
    ago = f"{duration(job.now - incident.at)} ago "
    cause, done = _line(incident.cause), f": {incident.outcome or f'the job is {job.state}'}"
    spare = max(LEAST_TEXT, width - len(ago) - len(done))
    return f"{ago}{cause if len(cause) <= spare else f'{cause[: spare - 1]}…'}{done}"


def _rows(
    rows: Sequence[RankFacts], width: int, blocks: str, selected: int | None
) -> Iterator[Text]:
    """Column titles, then ranks."""
    columns = fit(rows, width)
    top_s = tallest(rows)
    titles = [_title(one, top_s, blocks) for one in columns]
    yield Text(
        (" " * GAP).join(_placed(one, title) for one, title in zip(columns, titles, strict=True)),
        "bold",
    )
    for at, row in enumerate(rows):
        line = Text()
        for one in columns:
            shown = (
                chart(row.step_s, top_s, one.width, blocks)
                if one.column.title == CHART
                else one.cells[at]
            )
            line.append(" " * GAP if line else "")
            line.append(_placed(one, shown), _style(one.column.title, shown))
        line.stylize("reverse" if at == selected else "")
        yield line


def _title(one: Fitted, top_s: float, blocks: str) -> str:
    if one.column.title != CHART or top_s <= 0:
        return one.column.title
    explained = f"{CHART}, {blocks[-1]} {span(top_s)}"
    return explained if len(explained) <= one.width else CHART


def _placed(one: Fitted, text: str) -> str:
    return text.ljust(one.width) if one.column.is_left else text.rjust(one.width)


def _style(title: str, shown: str) -> str:
    match title:
        case "state":
            return STYLES.get(shown, OTHER)
        case "silent":
            return "red"
        case _ if title == CHART:
            return "cyan"
    return ""


def _foot(left: str, right: str, width: int) -> Text:
    space = max(2, width - len(left) - len(right))
    return Text(f"{left}{' ' * space}{right}", "dim")


def _line(text: str) -> str:
    """Text from outside as one harmless line."""
    return sanitized(text).expandtabs().replace("\n", " ")


def _cut(line: Text, width: int) -> Text:
    """A copy that fits; an ellipsis marks the cut."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line
