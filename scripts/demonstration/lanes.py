"""Draws a training: a lane for each rank, the loss as a chart, what was lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from training import Is, Lane, Sight

from msrun.top.columns import BLOCKS

STYLES = {
    Is.STARTING: "dim",
    Is.TRAINING: "cyan",
    Is.DEAD: "bold red",
    Is.STOPPED: "bold red",
    Is.NEW: "bold green",
    Is.RESUMING: "bold yellow",
    Is.DONE: "green",
}
BAR, CHART = 36, 60  # cells


def frame(title: str, sight: Sight, steps: int, keys: str = "") -> list[Text]:
    """The lines of one moment.

    Args:
        title: what is trained.
        sight: what is seen of it.
        steps: how many the bars have room for.
        keys: what may be typed, if anything.
    """
    lost = f"steps lost {sight.lost_steps}   seconds lost {sight.lost_s:.1f}"
    return [
        Text.assemble((title, "bold"), f"   step {sight.step}"),
        Text(),
        *(_lane(lane, steps) for lane in sight.lanes),
        Text(),
        Text.assemble("loss  ", (chart(sight.losses), "cyan"), *_newest(sight.losses)),
        Text.assemble((f"kills {sight.kills}   ", "bold red" if sight.kills else ""), lost),
        Text(sight.news),
        Text(),
        Text(keys, "dim"),
    ]


def chart(losses: Sequence[float]) -> str:
    """The last losses as blocks, the highest of them as the full one; each block is a mean."""
    share = max(1, -(-len(losses) // CHART))
    means = [
        sum(losses[at : at + share]) / len(losses[at : at + share])
        for at in range(0, len(losses), share)
    ]
    top, low = max(means, default=1.0), min(means, default=0.0)
    scale = (len(BLOCKS) - 1) / ((top - low) or 1.0)
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _newest(losses: Sequence[float]) -> tuple[str, ...]:
    return (f" {losses[-1]:.3f}",) if losses else ()


def _lane(lane: Lane, steps: int) -> Text:
    style = STYLES[lane.does]
    filled = min(BAR, BAR * lane.step // max(1, steps))
    pid = f"pid {lane.pid}" if lane.pid else ""
    return Text.assemble(
        f"rank {lane.rank}  ",
        ("━" * filled, style),
        ("─" * (BAR - filled), "dim"),
        f" {lane.step:>5}  {pid:<12} ",
        (lane.does.value, style),
    )
