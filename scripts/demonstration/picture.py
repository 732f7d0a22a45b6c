"""``scripts/picture``: the moving picture at the top of the README, made from a real demo.

Frames of one run follow each other in one SVG without scripts, fonts or links, so that any browser
shows it, also inside of a Markdown page.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lanes import frame
from live import (
    DIGITS_STEPS,
    DIGITS_TITLE,
    ROOT,
    UNDISTURBED_TITLE,
    by_itself,
    prepare,
    shown,
    verdict,
)
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from training import Is, Sight

from agent.workers.processes import become_subreaper
from msrun.terminal.progress import say

TARGET = ROOT / "docs/assets/demo.svg"
WIDTH, LINES = 92, 18  # characters
TITLE = "scripts/demo"
EARLIER = (12, 30)  # steps of frames before the kill
LATER = (64, 80)  # and after it


class Still(NamedTuple):
    """One frame and for how long it is shown."""

    lines: Sequence[Text]
    for_s: float


def stills(folder: Path) -> list[Still]:
    """The frames of a demo that nobody plays.

    Raises:
        RuntimeError: both ends are not equal, or the kill was not seen.
    """
    demo = prepare(folder, is_play=False)
    wanted = dict.fromkeys((*EARLIER, *LATER))
    found: dict[str, tuple[Sequence[Text], float]] = {}
    last = Sight((), ())
    try:
        for title, sight in by_itself(demo):
            if title != UNDISTURBED_TITLE:
                last = sight
                for step in [each for each in wanted if each <= sight.step]:
                    del wanted[step]
                    found[f"step {step}"] = shown(title, sight, is_play=False), 0.9
                states = {lane.does for lane in sight.lanes}
                for does, for_s in ((Is.DEAD, 1.6), (Is.NEW, 2.2)):
                    if does in states and (does is Is.DEAD or " back after " in sight.news):
                        found.setdefault(does.value, (shown(title, sight, is_play=False), for_s))
            time.sleep(0.02)
        lines, is_equal = verdict(demo)
    finally:
        demo.struck.close()
        demo.undisturbed.close()
    if not is_equal or not {Is.DEAD.value, Is.NEW.value} <= found.keys():
        raise RuntimeError(f"this demo is no proof: {sorted(found)}, {lines[-1].plain}")
    end = [*frame(DIGITS_TITLE, last, DIGITS_STEPS)[:-2], *lines]
    return [*(Still(*each) for each in found.values()), Still(end, 5.0)]


def drawn(lines: Sequence[Text], number: int) -> str:
    """One frame as SVG."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), highlight=False)
    for line in [*lines, *[Text()] * (LINES - len(lines))]:
        console.print(line, no_wrap=True, overflow="crop")
    svg = console.export_svg(title=TITLE, theme=MONOKAI, unique_id=f"f{number}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # of a server elsewhere
    return re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)


def moving(stills: Sequence[Still]) -> str:
    """All frames in one SVG, one visible at a time, again and again."""
    whole_s = sum(still.for_s for still in stills)
    rules, frames, begun_s, box = [], [], 0.0, ""
    for number, still in enumerate(stills):
        svg = drawn(still.lines, number)
        box = re.search(r'viewBox="([^"]+)"', svg)[1]  # type: ignore[index]
        at, until = (100 * moment / whole_s for moment in (begun_s, begun_s + still.for_s))
        begun_s += still.for_s
        rules.append(
            f"@keyframes m{number}{{0%{{visibility:hidden}}{at:.2f}%{{visibility:visible}}"
            f"{until:.2f}%{{visibility:hidden}}}}"
        )
        is_last = number == len(stills) - 1  # what a reader sees who shows no movement
        rules.append(
            f".m{number}{{visibility:{'visible' if is_last else 'hidden'};"
            f"animation:m{number} {whole_s:.1f}s step-end infinite}}"
        )
        frames.append(f'<g class="m{number}">{svg}</g>')
    style = "\n".join(rules)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n<style>\n{style}\n</style>\n'
        + "\n".join(frames)
        + "\n</svg>\n"
    )


def main(argv: Sequence[str]) -> int:
    """Write the picture; 0 if the demo was a proof."""
    parser = argparse.ArgumentParser(prog="scripts/picture", description=__doc__)
    parser.add_argument("--to", type=Path, default=TARGET, help="the file")
    target = parser.parse_args(argv).to
    folder = Path(tempfile.mkdtemp(prefix="msrun-picture."))
    become_subreaper()
    try:
        target.write_text(moving(stills(folder)))
    except RuntimeError as error:
        say(str(error))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"{target} is new: look at it before you commit it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
