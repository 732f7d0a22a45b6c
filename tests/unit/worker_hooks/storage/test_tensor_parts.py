"""Parts of a tensor, cut along any dimensions, are put together to the bytes it had."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage.safetensors_file import header, read_header
from worker_hooks.storage.tensor_parts import Block, joined, runs


def write(path, tensors, sharding=None, metadata=()):
    """A file of tensors: name -> (dtype, shape, bytes)."""
    entries = [Entry(n, dtype, shape, len(data)) for n, (dtype, shape, data) in tensors.items()]
    told = {} if sharding is None else {"DCP_SHARDING_INFO": json.dumps(sharding)}
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(header(entries, {**dict(metadata), **told}) + data)
    return path, read_header(path)


def content(whole):
    assert whole.entry.nbytes == sum(run.nbytes for run in runs(whole))
    return b"".join(run.path.read_bytes()[run.at : run.at + run.nbytes] for run in runs(whole))


def block(data, shape, offsets, part, width):
    """The bytes of a block of a tensor."""
    out = b""
    for index in itertools.product(*(range(o, o + n) for o, n in zip(offsets, part, strict=True))):
        at = 0
        for place, size in zip(index, shape, strict=True):
            at = at * size + place
        out += data[at * width : (at + 1) * width]
    return out


def cut(rng, size, pieces):
    edges = [0, *sorted(rng.randint(0, size) for _ in range(pieces - 1)), size]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_gives_the_tensor_back(tmp_path, seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    data = rng.randbytes(math.prod(shape) * 2)
    grid = [cut(rng, size, rng.randint(1, 3)) for size in shape]
    files = []
    for number, spans in enumerate(itertools.product(*grid)):
        offsets = [start for start, _ in spans]
        part = tuple(stop - start for start, stop in spans)
        place = {"saved_offsets": offsets}
        if rng.random() < 0.5:
            place["global_shape"] = list(shape)
        tensors = {"t": ("F16", part, block(data, shape, offsets, part, 2))}
        files.append(write(tmp_path / f"{number}", tensors, {"t": place}))
    rng.shuffle(files)
    (whole,) = joined(files, has_replicas=True).values()
    assert (whole.entry.shape, content(whole)) == (shape, data)


@pytest.mark.parametrize("seed", range(60))
def test_any_block_is_read_out_of_any_cut(tmp_path, seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
    data = rng.randbytes(math.prod(shape) * 2)
    grid = [cut(rng, size, rng.randint(1, 3)) for size in shape]
    files = []
    for number, spans in enumerate(itertools.product(*grid)):
        offsets, part = [a for a, _ in spans], tuple(b - a for a, b in spans)
        place = {"saved_offsets": offsets, "global_shape": list(shape), "distributed": True}
        tensors = {"t": ("F16", part, block(data, shape, offsets, part, 2))}
        files.append(write(tmp_path / f"{number}", tensors, {"t": place}))
    (whole,) = joined(files, has_replicas=True, others=[path for path, _ in files]).values()
    for _ in range(10):
        spans = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
        offsets, part = tuple(a for a, _ in spans), tuple(b - a for a, b in spans)
        found = list(runs(whole, Block(offsets, part)))
        read = b"".join(run.path.read_bytes()[run.at : run.at + run.nbytes] for run in found)
        assert read == block(data, shape, offsets, part, 2)


def test_what_is_not_distributed_belongs_to_its_own_file(tmp_path):
    place = {"t": {"saved_offsets": [0], "global_shape": [2], "distributed": True}}
    other = {"t": {"saved_offsets": [1], "global_shape": [2], "distributed": True}}
    one = write(tmp_path / "1", {"t": ("U8", (1,), b"a"), "u": ("U8", (1,), b"1")}, place)
    two = write(tmp_path / "2", {"t": ("U8", (1,), b"b"), "u": ("U8", (1,), b"2")}, other)
    found = joined([one, two], has_replicas=True, others=[two[0]])
    assert {name: content(each) for name, each in found.items()} == {"t": b"ab", "u": b"1"}


def test_rows_of_different_parts_may_overlap(tmp_path):
    """One rank has all columns of some rows, others have halves of all rows."""
    data = bytes(range(24))
    files = [
        write(
            tmp_path / str(number),
            {"t": ("U8", part, block(data, (4, 6), offsets, part, 1))},
            {"t": {"saved_offsets": offsets, "global_shape": [4, 6]}},
        )
        for number, (offsets, part) in enumerate(
            [([1, 0], (2, 6)), ([0, 0], (4, 3)), ([0, 3], (4, 3))]
        )
    ]
    assert content(joined(files, has_replicas=True)["t"]) == data


def test_tensors_of_one_file_need_no_word_about_parts(tmp_path):
    tensors = {
        "a": ("F32", (2, 3), bytes(range(24))),
        "none": ("F32", (0, 5), b""),
        "scalar": ("I64", (), bytes(8)),
    }
    found = joined([write(tmp_path / "x", tensors)], has_replicas=False)
    assert {name: content(whole) for name, whole in found.items()} == {
        name: data for name, (_, _, data) in tensors.items()
    }


def test_types_in_a_guise_have_one_more_offset(tmp_path):
    half = {"t": {"saved_offsets": [0, 0], "global_shape": [4]}}
    rest = {"t": {"saved_offsets": [2, 0], "global_shape": [4]}}
    files = [
        write(tmp_path / "a", {"t": ("C128", (2,), bytes(range(32)))}, half),
        write(tmp_path / "b", {"t": ("C128", (2,), bytes(range(32, 64)))}, rest),
    ]
    (whole,) = joined(files, has_replicas=True).values()
    assert whole.entry == Entry("t", "C128", (4,), 64)
    assert content(whole) == bytes(range(64))


def halves(tmp_path, *places, dtype=("U8", "U8"), shapes=((2,), (2,))):
    return [
        write(tmp_path / str(nr), {"t": (dtype[nr], shapes[nr], bytes(2))}, {"t": place})
        for nr, place in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "more", "said"),
    [
        ([{"saved_offsets": [0]}, {"saved_offsets": [3]}], {}, "parts of t are missing"),
        ([{"saved_offsets": [1]}, {"saved_offsets": [3]}], {}, "parts of t are missing"),
        ([{"saved_offsets": [0], "global_shape": [5]}, {"saved_offsets": [2]}], {}, "parts of t are missing"),
        ([{"saved_offsets": [0], "global_shape": [3]}, {"saved_offsets": [2]}], {}, "differ in their types or shapes"),
        ([{"global_shape": [4]}, {"saved_offsets": [2], "global_shape": [5]}], {}, "differ in their types or shapes"),
        ([{}, {"saved_offsets": [2]}], {"dtype": ("U8", "I8")}, "differ in their types or shapes"),
        ([{}, {"saved_offsets": [2]}], {"shapes": ((2,), (1, 2))}, "does not say where its part of t belongs"),
        ([{}, {"saved_offsets": [2, 0]}], {"shapes": ((2,), (1, 2))}, "differ in their types or shapes"),
        ([{}, {"saved_offsets": ["2"]}], {}, "does not say where its part of t belongs"),
        ([{}, {"saved_offsets": [-2]}], {}, "does not say where its part of t belongs"),
        ([{}, {"saved_offsets": []}], {}, "does not say where its part of t belongs"),
        ([{}, []], {}, "does not say where its part of t belongs"),
        ([{}, {"global_shape": 7}], {}, "does not say where its part of t belongs"),
    ],
)  # fmt: skip
def test_parts_that_do_not_make_up_a_tensor_are_one_sentence(tmp_path, places, more, said):
    with pytest.raises(ValueError, match=said):
        joined(halves(tmp_path, *places, **more), has_replicas=True)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_words_about_parts_that_are_not_json_are_one_sentence(tmp_path, text):
    file = write(tmp_path / "x", {}, metadata={"DCP_SHARDING_INFO": text})
    with pytest.raises(ValueError, match="is not a JSON object"):
        joined([file], has_replicas=True)


def test_the_same_part_twice_is_the_same_only_where_that_was_promised(tmp_path):
    files = halves(tmp_path, {}, {})
    assert content(joined(files, has_replicas=True)["t"]) == bytes(2)
    with pytest.raises(ValueError, match=r"t is in .*0 and in .*1: name one of them"):
        joined(files, has_replicas=False)


def test_a_cut_within_a_byte_is_one_sentence(tmp_path):
    files = [
        write(
            tmp_path / str(row),
            {"t": ("F4", (2, 1), bytes(1))},
            {"t": {"saved_offsets": [0, row], "global_shape": [2, 2]}},
        )
        for row in range(2)
    ]
    with pytest.raises(ValueError, match="t was cut within a byte"):
        list(runs(joined(files, has_replicas=True)["t"]))


def test_the_rooms_need_no_torch():
    rooms = ["list", "show", "verify", "prune", "merge", "catalog"]
    code = "import sys; " + "; ".join(f"import msrun.checkpoints.{room}" for room in rooms)
    code += "; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("splits", [1, 2])
def test_parts_of_another_tensor_of_that_name_are_not_taken(tmp_path, splits):
    """As in two stages of a pipeline, each of which is cut over ranks."""

    def part(name, at, data):
        place = {"saved_offsets": [at], "global_shape": [4], "distributed": True}
        told = {"DCP_SHARDING_INFO": json.dumps({"w": place})}
        path = tmp_path / name
        path.write_bytes(header([Entry("w", "U8", (len(data),), len(data))], told) + data)
        return path, read_header(path)

    stage = [part("0", 0, b"ab"), part("1", 2, b"cd")]
    mine = [part("2", 2, b"CD")] if splits == 1 else [part("2", 2, b"C"), part("3", 3, b"D")]
    other = part("4", 0, b"AB")
    files = [*stage, *mine, other]
    others = {path for path, _ in (*stage, other)}
    whole = joined(files, has_replicas=True, others=others)["w"]
    read = b""
    for path, at, nbytes in runs(whole, Block((2,), (2,))):
        read += path.read_bytes()[at : at + nbytes]
    assert read == b"CD"
