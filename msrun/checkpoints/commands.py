"""``msrun checkpoints``: the commands that list, check, delete and convert checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from agent.spec.job_spec import UsageError

DAMAGED_EXIT = 1

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def checkpoints() -> None:
    """List, show, verify, prune and merge checkpoints.

    FOLDER holds checkpoints, or is one; it may also be a foreign safetensors file or a folder of
    them. `msrun checkpoints FOLDER` lists it.

    Exit code 1: something is damaged; 2: there is nothing, or wrong usage.
    """


@checkpoints.command("list")
@FOLDER
@click.option("--verify", "verifies", is_flag=True, help="Also compare all checksums.")
@AS_JSON
def list_(folder: Path, *, verifies: bool, as_json: bool) -> int:
    """List what FOLDER, or else the folders in it, holds, the newest step first.

    Without --verify only manifests, headers and sizes are checked.
    """
    from msrun.checkpoints.catalog import look
    from msrun.checkpoints.list import show as show_list

    return _code(
        is_sound=show_list(
            folder, look(folder, below=True), time.time(), verifies=verifies, as_json=as_json
        )
    )


@checkpoints.command()
@FOLDER
@AS_JSON
def show(folder: Path, *, as_json: bool) -> int:
    """Show the facts, files and tensors of a checkpoint; of several, the newest.

    FOLDER may also be a single safetensors file. No tensor is read.
    """
    from msrun.checkpoints.catalog import look
    from msrun.checkpoints.show import show as show_all

    return _code(is_sound=show_all(look(folder), time.time(), as_json=as_json))


@checkpoints.command()
@FOLDER
@AS_JSON
def verify(folder: Path, *, as_json: bool) -> int:
    """Read every file in FOLDER and compare it with its checksum.

    A foreign file has no checksum: its header, offsets and size are checked. Exit code 1 if
    anything is damaged, or nothing is complete.
    """
    from msrun.checkpoints.catalog import look
    from msrun.checkpoints.verify import verify as verify_all

    return _code(is_sound=verify_all(folder, look(folder), as_json=as_json))


@checkpoints.command()
@FOLDER
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the N newest (no default: give this or --per-minutes).",
)
@click.option(
    "--per-minutes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep one for each N minutes, and the newest (default: no such rule).",
)
@click.option(
    "--prefix",
    metavar="TEXT",
    help="Only periodic checkpoints with this prefix (default: all, and dumps).",
)
@click.option("--dry-run", "is_dry", is_flag=True, help="Only print what would be deleted.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask; needed without a terminal.")
def prune(
    folder: Path,
    *,
    keep: int | None,
    per_minutes: int | None,
    prefix: str | None,
    is_dry: bool,
    is_sure: bool,
) -> int:
    """Delete the oldest checkpoints in FOLDER.

    The newest checkpoint that passes verification always stays. Foreign files and unfinished
    checkpoints stay; the remains of interrupted deletions are deleted.
    """
    from msrun.checkpoints.catalog import look
    from msrun.checkpoints.prune import PruneRule
    from msrun.checkpoints.prune import prune as prune_all

    if (keep is None) == (per_minutes is None):
        raise UsageError("msrun checkpoints prune: give either --keep or --per-minutes")
    rule = PruneRule(keep=keep or 0, per_minutes=per_minutes or 0, prefix=prefix)
    return _code(is_sound=prune_all(folder, look(folder), rule, is_dry=is_dry, is_sure=is_sure))


@checkpoints.command()
@FOLDER
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write (default: the checkpoint's name with .safetensors, in this folder).",
)
@click.option(
    "--only",
    metavar="NAME",
    help="Only this registered object, under its own names: with --only model, the keys are those "
    "of model.load_state_dict (default: all objects, under the names in the checkpoint).",
)
@click.option("--force", "is_forced", is_flag=True, help="Replace FILE if it exists.")
def merge(folder: Path, *, output: Path | None, only: str | None, is_forced: bool) -> int:
    """Write a checkpoint's tensors into one safetensors file.

    Of several checkpoints it takes the newest that passes verification. The ranks' private state,
    such as random generators, is left out.
    """
    from msrun.checkpoints.catalog import look
    from msrun.checkpoints.merge import MergeOrder
    from msrun.checkpoints.merge import merge as merge_all

    order = MergeOrder(output=output, only=only, is_forced=is_forced)
    return _code(is_sound=merge_all(folder, look(folder), order))


def completed(argv: Sequence[str]) -> Sequence[str]:
    """``checkpoints FOLDER`` as ``checkpoints list FOLDER``; other commands as they are."""
    word = argv[1] if len(argv) > 1 and argv[0] == checkpoints.name else ""
    is_folder = word not in checkpoints.commands and (os.path.exists(word) or os.sep in word)
    return (argv[0], "list", *argv[1:]) if is_folder else argv


def _code(*, is_sound: bool) -> int:
    return 0 if is_sound else DAMAGED_EXIT
