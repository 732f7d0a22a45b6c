"""The pictures of a report: lanes of ranks, and the time of steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.text.ranges import format_ranges
from agent.text.wording import lasting
from msrun.report.lanes import CELLS, Lane
from msrun.report.markup import Markup, joined, tag
from msrun.report.pace import Point
from msrun.report.timeline import Doing
from msrun.terminal.table import brief

HEIGHT = 100  # of a chart, in its own units
LONGEST_LABEL = 18  # characters
WORDS = {
    Doing.STARTING: "starting",
    Doing.RUNNING: "running (no TrainState: not known whether it trains)",
    Doing.TRAINING: "training",
    Doing.FROZEN: "frozen, waits for a lost rank",
    Doing.LOST: "lost, until it is replaced",
    Doing.STOPPING: "stopping",
}


def drawn_lanes(found: Sequence[Lane], began: float, ended: float) -> Markup:
    """A lane for each rank, or for ranks that did the same; a legend; the time."""
    seen = {doing for lane in found for _, _, doing in lane.runs}
    key = [
        tag("span", _box(tag("rect", width=10, height=10, class_=doing.value)), words)
        for doing, words in WORDS.items()
        if doing in seen
    ]
    if any(lane.marks for lane in found):
        key.append(tag("span", _box(tag("path", d="M5 0V10", class_="fail")), "a rank failed"))
    rows = [_lane(lane) for lane in found]
    return joined(
        tag("div", *key, class_="key"),
        *rows,
        tag("div", tag("span"), _axis(began, ended), class_="lane"),
    )


def _box(*content: object) -> Markup:
    return tag("svg", *content, viewBox="0 0 10 10")


def _lane(lane: Lane) -> Markup:
    label = format_ranges(lane.ranks)
    if len(label) > LONGEST_LABEL:
        label = f"{label[:LONGEST_LABEL]}... ({len(lane.ranks)})"
    if lane.is_rest:
        said = f"{len(lane.ranks)} more ranks are not drawn; each is unlike the others"
        return tag("div", tag("span", label), tag("span", said), class_="lane")
    paths: dict[Doing, list[str]] = {}
    for first, after, doing in lane.runs:
        if doing is not Doing.OVER:
            paths.setdefault(doing, []).append(f"M{first} 0H{after}V10H{first}Z")
    shapes = [tag("path", d="".join(parts), class_=each.value) for each, parts in paths.items()]
    if lane.marks:
        ticks = "".join(f"M{cell + 0.5:g} 0V10" for cell in lane.marks)
        shapes.append(tag("path", d=ticks, class_="fail"))
    bar = tag("svg", *shapes, viewBox=f"0 0 {CELLS} 10", preserveAspectRatio="none")
    return tag("div", tag("span", label), bar, class_="lane")


def _axis(began: float, ended: float) -> Markup:
    marks = [lasting((ended - began) * part / 4) for part in range(5)]
    return tag("div", *(tag("span", mark) for mark in marks), class_="axis")


def drawn_lines(lines: Mapping[str, Sequence[Point]], began: float, ended: float) -> Markup:
    """The time of steps: a line for each name."""
    highest = max(point[1] for points in lines.values() for point in points)
    width, top = max(ended - began, 1e-6), max(highest, 1e-9)
    drawn, key = [], []
    for number, (name, points) in enumerate(lines.items()):
        at = [
            f"{CELLS * (when - began) / width:.1f} {HEIGHT * (1 - took_s / top):.1f}"
            for when, took_s in points
        ]
        drawn.append(tag("path", d=f"M{'L'.join(at)}h8", class_=f"l l{number}"))  # a point shows
        swatch = _box(tag("path", d="M0 5H10", class_=f"l l{number}"))
        key.append(tag("span", swatch, name))
    chart = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {CELLS} {HEIGHT}",
        preserveAspectRatio="none",
        class_="chart",
    )
    return joined(
        tag("div", *key, class_="key"),
        tag("div", tag("span", brief(highest)), class_="axis"),
        chart,
        _axis(began, ended),
    )
