"""Random drills over all styles of sharded state: what they cost, and that each ends bitwise equal.

    python tests/support/sharded_drills.py COUNT [FIRST_SEED] [STYLE ...]

Of each style COUNT drills: a rank killed, two or all at once, a second death amid the recovery, a
rank that hangs. It fails if one does not end equal; how many steps each cost is printed, and has to
be 0 where a holder of each part lived (docs/architecture/sharded-state.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

WORKERS = Path(__file__).parents[1] / "workers"
KINDS = "kill,double,all,again,hang"
STEPS = "20"
LIVE = "--protect-memory=live"


class Style(NamedTuple):
    """A training, and how it is protected."""

    ranks: int
    script: str
    word: str
    options: tuple[str, ...] = ()


STYLES = {
    "hsdp": Style(4, "train_sharded.py", "hsdp"),
    "tpdp": Style(4, "train_sharded.py", "tpdp"),
    "3d": Style(8, "train_mesh.py", "3d"),
    "3d_live": Style(8, "train_mesh.py", "3d", (LIVE,)),
    "tp_replicate": Style(4, "train_mesh.py", "tp_replicate"),
    "tp": Style(2, "train_mesh.py", "tp", (LIVE,)),
    "tp_fsdp": Style(4, "train_mesh.py", "tp_fsdp", (LIVE,)),
    "fsdp": Style(4, "train_sharded.py", "fsdp"),
    "fsdp_live": Style(4, "train_sharded.py", "fsdp", (LIVE,)),
    "experts": Style(4, "train_sharded.py", "moe", (LIVE,)),
    "pipeline": Style(4, "train_mesh.py", "pipeline"),
    "pipeline_live": Style(4, "train_mesh.py", "pipeline", (LIVE,)),
    "fsdp1": Style(2, "train_parts.py", "fsdp1", (LIVE,)),
    "fsdp1_hybrid": Style(4, "train_parts.py", "fsdp1_hybrid"),
    "zero": Style(4, "train_mesh.py", "zero", (LIVE,)),
}


def drilled(style: Style, count: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """The outcomes of so many drills.

    Raises:
        RuntimeError: they did not run.
    """
    drill = ["--json", f"--random={count}", f"--seed={seed}", f"--of={KINDS}"]
    options = [f"--worker_num={style.ranks}", "--max-restarts=5", *style.options]
    script = [str(WORKERS / style.script), style.word, STEPS, "--pause=0.05"]
    words = [sys.executable, "-m", "msrun", "drill", *drill, "--", *options, *script]
    with TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    yield from json.loads(done.stdout)["drills"]


def main() -> int:
    """Run them; the exit code: 1 if one did not end well, and equal."""
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    total = Counter[str]()
    for name in sys.argv[3:] or STYLES:
        for one in drilled(STYLES[name], count, seed):
            lost = one["steps_lost"]
            others = [each for each in one["broken"] if not each.endswith(" lost")]
            is_equal = one["weights_equal"] and not others
            total[f"{name}: {'equal' if is_equal else 'NOT EQUAL'}"] += 1
            total[f"{name}: {lost} lost"] += 1
            what = "; ".join(others) or f"{lost} steps lost"
            print(f"{name:14} {one['fault']}: {what}, {one['answer'] or '-'}", flush=True)
    print(*(f"{number:4} {what}" for what, number in sorted(total.items())), sep="\n")
    return int(any("NOT EQUAL" in what for what in total))


if __name__ == "__main__":
    sys.exit(main())
