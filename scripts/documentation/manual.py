"""``scripts/docs``: writes the generated pages, checks the manual, builds a site of it."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import command_line  # noqa: E402
import dead_links  # noqa: E402
import journal  # noqa: E402
import state_machine  # noqa: E402
import unknown_options  # noqa: E402
from markdown_pages import read  # noqa: E402

DOCS = ROOT / "docs"
GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/command-line.md": command_line.page,
    "reference/events.md": journal.page,
    "reference/schemas/events.schema.json": journal.schema,
    "architecture/state-machine.md": state_machine.page,
}


def generate() -> Iterator[str]:
    """Write the pages that are made from code; those that have changed."""
    for name in stale():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(GENERATED[name]())
        yield name


def stale() -> Iterator[str]:
    """The generated pages that do not say what the code says."""
    for name, made in GENERATED.items():
        path = DOCS / name
        if not path.exists() or path.read_text() != made():
            yield name


def problems() -> Iterator[str]:
    """Everything that is wrong with the pages, but for what mkdocs finds."""
    yield from (f"docs/{name}: stale, run scripts/docs generate" for name in stale())
    own = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    of_samples = [*ROOT.glob("scripts/samples/*/*.md")]  # their options are the samples' own
    pages = {path: read(path) for path in sorted(own + of_samples)}
    for path, page in pages.items():
        found = [*dead_links.problems(page, pages, ROOT)]
        found += unknown_options.problems(page) if path in own else ()
        yield from (f"{path.relative_to(ROOT)}: {one}" for one in found)


def build(folder: str) -> int:
    """Build the site, strictly; mkdocs's exit code."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("INFO")]
    print(*said, sep="\n", end="\n" if said else "")
    return done.returncode


def main() -> int:
    """Do what was asked; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("verb", choices=("generate", "check", "build"))
    verb = parser.parse_args().verb
    if verb == "generate":
        for name in generate():
            print(f"docs/{name}")
        return 0
    if verb == "build":
        return build(str(ROOT / "site"))
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    with tempfile.TemporaryDirectory() as folder:
        return build(folder) or bool(found)


if __name__ == "__main__":
    sys.exit(main())
