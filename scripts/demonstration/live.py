"""``scripts/demo`` on a terminal: ranks train before your eyes, die, and are back.

By itself it kills one of eight ranks; with ``--play`` whoever watches kills what they like. Then
the same training runs undisturbed, and both ends are compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lanes import frame  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402
from training import DemoTraining, Sight  # noqa: E402

from agent.workers.processes import become_subreaper  # noqa: E402
from msrun.drill.marathon_job import StuckError  # noqa: E402
from msrun.top.screen import DEADLY, Screen  # noqa: E402
from msrun.trials.history import DrillHistory  # noqa: E402
from msrun.trials.verdict import curves, differing  # noqa: E402

RANKS = 8
DIGITS = ROOT / "scripts/samples/power_off/train.py"
DIGITS_STEPS = 96  # of its eight epochs
VICTIM, AFTER = 3, 47  # the rank that is killed once all have committed so many steps
ENDLESS = ROOT / "msrun/drill/catalogue/everything.py"  # until a file names the last step
BAR_STEPS = 500  # of an endless training, until the bars begin anew
LOOK_S = 0.1
PLAY = "0-7 kill that rank   s stop one   m kill msrun itself   q end and compare"
KEYS = {**{str(rank).encode(): str(rank) for rank in range(RANKS)}, b"s": "s", b"m": "m", b"q": "q"}
DIGITS_TITLE = "8 ranks train a network on handwritten digits"
UNDISTURBED_TITLE = "The same training, undisturbed"
PLAY_TITLE = "8 ranks train: kill what you like"


class Demo(NamedTuple):
    """One training with kills, and the same one without."""

    struck: DemoTraining
    undisturbed: DemoTraining
    last: Path | None  # the file that names the last step; None: the script ends by itself


def prepare(folder: Path, *, is_play: bool) -> Demo:
    """Make the folders of both trainings."""
    last = folder / "last_step" if is_play else None

    def training(name: str) -> DemoTraining:
        saved = folder / name / "ckpt"
        program = (
            (str(DIGITS), f"--ckpt-save-path={saved}")
            if last is None
            else (str(ENDLESS), "--epochs=1000000000", f"--last={last}", f"--ckpt={saved}")
        )
        return DemoTraining(folder / name, program, os.environ, RANKS)

    return Demo(training("struck"), training("undisturbed"), last)


def shown(title: str, sight: Sight, *, is_play: bool) -> list[Text]:
    """The lines of one moment of a training."""
    steps = DIGITS_STEPS
    if is_play:
        steps = BAR_STEPS * (1 + sight.step // BAR_STEPS)
    return frame(title, sight, steps, PLAY if is_play else "")


def by_itself(demo: Demo) -> Iterator[tuple[str, Sight]]:
    """All moments of a demo that nobody plays, with their titles: kill a rank once, then compare.

    Whoever takes them decides how long to wait for the next one.

    Raises:
        StuckError: the job cannot be resumed.
    """
    training, has_struck = demo.struck, False
    training.start()
    while not training.is_over:
        sight = training.look()
        yield DIGITS_TITLE, sight
        if not has_struck and min(lane.step for lane in sight.lanes) >= AFTER:
            training.strike(VICTIM)
            has_struck = True
    yield from undisturbed(demo)


def undisturbed(demo: Demo) -> Iterator[tuple[str, Sight]]:
    """All moments of the training without kills."""
    if demo.last is not None:  # the other one may have gone further before it read the file
        demo.last.write_text(str(demo.struck.look().step))
    demo.undisturbed.start()
    while not demo.undisturbed.is_over:
        yield UNDISTURBED_TITLE, demo.undisturbed.look()


def play(demo: Demo, screen: Screen) -> None:
    """Let the keys strike, until ``q``; then all that remains is to compare.

    Raises:
        StuckError: the job cannot be resumed.
    """
    training, title = demo.struck, PLAY_TITLE
    assert demo.last is not None
    training.start()
    while not training.is_over:
        sight = training.look()
        screen.draw(shown(title, sight, is_play=not demo.last.exists()))
        for key in screen.wait(LOOK_S):
            match key:
                case "q" | "quit":
                    demo.last.write_text(str(sight.step + 1))
                    title = "the last steps"
                case _ if demo.last.exists():
                    pass
                case "m":
                    training.strike(None)
                case "s":
                    training.stop_one()
                case _ if key.isdecimal():
                    training.strike(int(key))
                case _:  # arrows and Esc are keys, too
                    pass


def verdict(demo: Demo) -> tuple[list[Text], bool]:
    """The end of both trainings side by side, and whether they are equal."""
    struck, whole = demo.struck.history(), demo.undisturbed.history()
    wrong = [*differing(whole, struck), *curves(whole, struck)]
    lines = [
        Text.assemble("weights after the kills   ", (_digest(struck), "bold")),
        Text.assemble("weights undisturbed       ", (_digest(whole), "bold")),
    ]
    if wrong or not whole.finals:
        lines.append(Text("NOT EQUAL: " + "; ".join(wrong or ["nothing was trained"]), "bold red"))
        return lines, False
    losses = f"so are the losses of {whole.last_step} steps"
    equal = f"equal on all {RANKS} ranks, bit for bit, and {losses}"
    return [*lines, Text(equal, "bold green")], True


def _digest(history: DrillHistory) -> str:
    return history.finals[0].digest if 0 in history.finals else "-"


def main(argv: Sequence[str]) -> int:
    """Show it; 0 if both ends are equal."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--play", action="store_true", help="you kill: 0-7, s, m, q")
    is_play = parser.parse_args(argv).play
    folder = Path(tempfile.mkdtemp(prefix="msrun-demo."))
    become_subreaper()
    demo, idle, is_proven = prepare(folder, is_play=is_play), os.eventfd(0), False
    sight, console = Sight((), ()), Console(highlight=False)
    try:
        with Screen(idle, KEYS) as screen:
            for signum in DEADLY:  # whoever leaves leaves no process behind
                signal.signal(signum, signal.default_int_handler)
            if is_play:
                play(demo, screen)
            moments = undisturbed(demo) if is_play else by_itself(demo)
            for title, each in moments:
                screen.draw(shown(title, each, is_play=False))
                if "quit" in screen.wait(LOOK_S):
                    return 1
        sight = demo.struck.look()
        lines, is_proven = verdict(demo)
        for line in [*shown("The training that was struck", sight, is_play=is_play)[:-2], *lines]:
            console.print(line)
    except StuckError as error:
        console.print(f"NOT PROVEN: {error}", style="bold red")
    except KeyboardInterrupt:
        return 130
    finally:
        demo.struck.close()
        demo.undisturbed.close()
        if is_proven:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"all files of the demo are in {folder}", file=sys.stderr)
    return 0 if is_proven else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
