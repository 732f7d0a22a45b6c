"""``msrun checkpoints show``: a checkpoint's manifest, its files, and every tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.text.sanitize import sanitized
from agent.text.wording import duration, sized
from msrun.checkpoints.catalog import CheckpointItem, checkpoints
from msrun.terminal.progress import counted
from msrun.terminal.stdout import put
from msrun.terminal.table import UNKNOWN, moment, show_json, table
from worker_hooks.storage.manifest import REPLICATED, Manifest, Shard, describe_dispute
from worker_hooks.storage.one_state import Files, tensors_by_groups
from worker_hooks.storage.safetensors_file import Header, read_header
from worker_hooks.storage.tensor_parts import JoinedTensor, joined

FILE_COLUMNS = ("file", "rank", "kind", "size", "sha256")
TENSOR_COLUMNS = ("tensor", "dtype", "shape", "size", "parts")
_GROUPS = "groups"  # one more column, where groups of ranks wrote what each of them holds
_SHOWN_DIGITS = 12  # of a checksum
_SHOWN_TEXT = 200  # characters of a header's metadata


class ShownTensor(NamedTuple):
    """A tensor, and from how many groups of ranks it comes."""

    whole: JoinedTensor
    groups: int


class FolderView(NamedTuple):
    """A checkpoint or a file with its headers."""

    item: CheckpointItem
    shards: tuple[Shard, ...]
    metadata: Mapping[str, str]
    tensors: tuple[ShownTensor, ...]
    flaws: tuple[str, ...]


def show(items: Sequence[CheckpointItem], now: float, *, as_json: bool) -> bool:
    """Print the newest complete checkpoint, or each foreign file; false: something is damaged.

    ``now``: seconds since the epoch.
    """
    views = [_opened(item) for item in _chosen(items)]
    if as_json:
        show_json([_described(view) for view in views])
    else:
        others = len(items) - len(views)
        put("\n".join(_text(view, others, now) for view in views))
    return not any(view.flaws for view in views)


def _chosen(items: Sequence[CheckpointItem]) -> Sequence[CheckpointItem]:
    """The items to show: of several checkpoints the newest one that seems complete."""
    found = [item for item, _ in checkpoints(items)]
    whole = [item for item in found if item.is_complete]
    return (whole or found)[:1] or items


def _opened(item: CheckpointItem) -> FolderView:
    match item.content:
        case Manifest() as manifest:
            groups, flaws = _headers(item.path, manifest)
            found = item.flaws or tuple(flaws)
            return _view(item, manifest.shards, {}, groups, found)
        case Header() as header:
            return _view(item, (), header.metadata, [[(item.path, header)]], item.flaws)
    return FolderView(item, (), {}, (), item.flaws or ("it is not complete",))


def _headers(folder: Path, manifest: Manifest) -> tuple[list[Files], list[str]]:
    """The files of each group that holds a state, the first side's if they disagreed; and flaws."""
    count = 1 if manifest.is_disputed else len(manifest.holders) or 1
    found: list[list[tuple[Path, Header]]] = [[] for _ in range(count)]
    flaws = []
    for shard in manifest.shards:
        if shard.kind == REPLICATED and shard.variant < count:
            path = folder / shard.file
            try:
                found[shard.variant].append((path, read_header(path)))
            except (OSError, ValueError) as error:
                flaws.append(str(error))
    return [*found], flaws


def _view(
    item: CheckpointItem,
    shards: tuple[Shard, ...],
    metadata: Mapping[str, str],
    groups: Sequence[Files],
    flaws: tuple[str, ...],
) -> FolderView:
    try:
        if len(groups) > 1:
            tensors = [ShownTensor(*each) for each in tensors_by_groups(groups)]
        else:
            found = joined(groups[0], has_replicas=bool(shards))
            tensors = [ShownTensor(whole, 1) for whole in found.values()]
    except ValueError as error:
        return FolderView(item, shards, metadata, (), flaws or (str(error),))
    tensors.sort(key=lambda each: each.whole.entry)
    return FolderView(item, shards, metadata, tuple(tensors), flaws)


def _described(view: FolderView) -> dict[str, Any]:
    manifest = view.item.content if isinstance(view.item.content, Manifest) else None
    facts = {} if manifest is None else manifest._asdict()
    return {
        "path": str(view.item.path.absolute()),
        "kind": view.item.kind,
        "nbytes": view.item.nbytes,
        **facts,
        "shards": [shard._asdict() for shard in view.shards],
        "metadata": dict(view.metadata),
        "tensors": [
            {**whole.entry._asdict(), "parts": len(whole.parts), _GROUPS: groups}
            for whole, groups in view.tensors
        ],
        "damages": list(view.flaws),
    }


def _text(view: FolderView, others: int, now: float) -> str:
    facts = "".join(f"{name:<10} {sanitized(value)}\n" for name, value in _facts(view, others, now))
    files = [
        (one.file, str(one.rank), _kind(one), sized(one.nbytes), one.sha256[:_SHOWN_DIGITS])
        for one in view.shards
    ]
    of_groups = isinstance(view.item.content, Manifest) and bool(view.item.content.holders)
    columns = (*TENSOR_COLUMNS, _GROUPS) if of_groups else TENSOR_COLUMNS
    tensors = [
        (
            *(entry.name, entry.dtype, _shape(entry.shape), sized(entry.nbytes), str(len(parts))),
            *([str(groups)] if of_groups else []),
        )
        for (entry, parts), groups in view.tensors
    ]
    text = facts
    if files:
        text += "\n" + table(FILE_COLUMNS, files, styled="kind")
    if tensors:
        text += "\n" + table(columns, tensors, styled="dtype")
    return text


def _facts(view: FolderView, others: int, now: float) -> Iterator[tuple[str, str]]:
    item = view.item
    yield "path", str(item.path)
    if others:
        yield "beside", f"{counted(others, 'other')}: `msrun checkpoints list` shows all"
    yield "kind", item.kind
    yield "size", sized(item.nbytes)
    if isinstance(item.content, Manifest):
        yield from _manifest_facts(item.content)
    if item.saved_at:
        yield "saved", f"{moment(item.saved_at)} ({duration(now - item.saved_at)} ago)"
    for name, text in sorted(view.metadata.items()):
        cut = text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}... ({len(text)} in all)"
        yield "metadata", f"{name}={json.dumps(cut)}"
    if view.tensors:
        nbytes = sum(each.whole.entry.nbytes for each in view.tensors)
        yield "tensors", f"{len(view.tensors)}, {sized(nbytes)}"
    for flaw in view.flaws:
        yield "damaged", flaw


def _manifest_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "step", f"{manifest.step} (epoch {manifest.epoch + 1}, batch {manifest.batch})"
    yield "ranks", str(manifest.world_size)
    yield "run", f"{manifest.record_id or UNKNOWN} (attempt {manifest.attempt})"
    if manifest.reason:
        yield "reason", manifest.reason
    if manifest.digest:
        yield "digest", manifest.digest
    if manifest.is_disputed:
        yield "disputed", describe_dispute(manifest)
    elif manifest.holders:
        yield "groups", f"each of {len(manifest.holders)} groups of ranks wrote what it holds"
    for name, ranks in (
        ("differing", manifest.odd),
        ("lost", manifest.without_private),
        ("stale", manifest.stale_private),
    ):
        if ranks:
            yield name, f"{_OF_RANKS[name]} {', '.join(map(str, ranks))}"


_OF_RANKS = {
    "differing": "the state differed on rank",
    "lost": "no private state of rank",
    "stale": "private state of an earlier step of rank",
}


def _kind(shard: Shard) -> str:
    return f"{shard.kind} (variant {shard.variant})" if shard.variant else shard.kind


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
