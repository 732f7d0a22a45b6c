"""Files of several replica groups are one state unless a name means something else in each of them."""

import json

import pytest

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage.one_state import IncompleteStateError, check_complete, why_not_one
from worker_hooks.storage.safetensors_file import header, read_header

BIG = 3 << 20


@pytest.fixture
def write(tmp_path):
    def written(name, tensors, places=None):
        """Tensors by name: shape and bytes."""
        entries = [Entry(key, "U8", shape, len(data)) for key, (shape, data) in tensors.items()]
        told = {"DCP_SHARDING_INFO": json.dumps(places or {})}
        content = b"".join(data for _, data in tensors.values())
        (tmp_path / name).write_bytes(header(entries, told) + content)
        return tmp_path / name, read_header(tmp_path / name)

    return written


def part(at, of):
    return {"saved_offsets": [at], "global_shape": [of], "distributed": True}


def test_parts_of_a_distributed_tensor_are_one_state(write):
    one = write("1", {"w": ((1,), b"a"), "step": ((1,), b"7")}, {"w": part(0, 2)})
    two = write("2", {"w": ((1,), b"b"), "step": ((1,), b"7")}, {"w": part(1, 2)})
    assert why_not_one([[one], [two]]) == ""


def test_one_name_for_two_contents_is_not(write):
    one, two = (write(name, {"w": ((2,), name.encode() * 2)}) for name in "12")
    assert why_not_one([[one], [two]]) == "w is not the same in all groups of ranks"
    three = write("3", {"w": ((1, 2), b"11")})
    assert why_not_one([[one], [three]]) == "w is not the same in all groups of ranks"


def test_names_of_one_group_alone_are_no_matter(write):
    one, two = (write(name, {name: ((1,), b"x")}) for name in "12")
    assert why_not_one([[one], [two]]) == ""


def test_what_is_cut_into_rows_is_compared_as_a_whole(write):
    data = bytes(range(256)) * (BIG // 256)
    rows = [
        write(
            f"row{at}",
            {"t": ((size,), data[at : at + size])},
            {"t": {"saved_offsets": [at], "global_shape": [BIG]}},
        )
        for at, size in ((0, 1000), (1000, BIG - 1000))
    ]
    same, other = write("same", {"t": ((BIG,), data)}), bytearray(data)
    other[-1] ^= 1
    odd = write("odd", {"t": ((BIG,), bytes(other))})
    assert why_not_one([rows, [same]]) == ""
    assert why_not_one([rows, [odd]]) == "t is not the same in all groups of ranks"
    assert "too large" in why_not_one([rows, [same]], most=BIG - 1)
    assert why_not_one([rows, [same]], most=BIG) == ""


def test_one_name_for_parts_and_for_a_whole_is_not(write):
    one = write("1", {"w": ((1,), b"a")}, {"w": part(0, 2)})
    two = write("2", {"w": ((1,), b"b")}, {"w": part(1, 2)})
    three = write("3", {"w": ((2,), b"ab")})
    assert why_not_one([[one], [two], [three]]) == "w is not the same in all groups of ranks"


@pytest.mark.parametrize(("at", "size"), [(0, 2), (0, 1), (1, 1), (0, 4), (1, 3)])
def test_what_two_groups_hold_of_a_distributed_tensor_is_compared(write, at, size):
    def files(data):
        halves = [
            write(name, {"w": ((2,), data[x : x + 2])}, {"w": part(x, 4)})
            for name, x in (("1", 0), ("2", 2))
        ]
        again = write("3", {"w": ((size,), b"abcd"[at : at + size])}, {"w": part(at, 4)})
        return [*([one] for one in halves), [again]]

    assert why_not_one(files(b"abcd")) == ""
    other = bytearray(b"abcd")
    other[at] ^= 1
    assert why_not_one(files(bytes(other))) == "w is not the same in all groups of ranks"
    assert "too large" in why_not_one(files(b"abcd"), most=size - 1)
    assert why_not_one(files(b"abcd"), most=size) == ""


def test_a_hole_is_named(write):
    one = write("1", {"w": ((1,), b"a")}, {"w": part(0, 3)})
    two = write("2", {"w": ((1,), b"b")}, {"w": part(1, 3)})
    three = write("3", {"w": ((1,), b"c")}, {"w": part(2, 3)})
    holders = [(0, 3), (1,), (2,)]
    check_complete([[one], [two], [three]], holders)
    with pytest.raises(IncompleteStateError, match="parts of w are missing"):
        check_complete([[one], [two]], holders)
    with pytest.raises(IncompleteStateError, match="no file has the state of rank 0, 3"):
        check_complete([[], [two], [three]], holders)


def test_what_is_not_distributed_must_be_whole_in_its_own_group(write):
    place = {"saved_offsets": [0], "global_shape": [2]}
    one = write("1", {"w": ((1,), b"a")}, {"w": place})
    two = write("2", {"w": ((1,), b"b")}, {"w": place | {"saved_offsets": [1]}})
    check_complete([[one, two]])
    with pytest.raises(IncompleteStateError, match="parts of w are missing"):
        check_complete([[one], [two]], [(0,), (1,)])
