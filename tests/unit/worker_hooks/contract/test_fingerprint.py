"""Texts that ranks compare: bundled to fit into a packet, and described for people."""

import pytest

from worker_hooks.contract.fingerprint import MOST, PART, bundled, describe, differences
from worker_hooks.contract.protocol import Fingerprinted
from worker_hooks.contract.wire import PACKET_BYTES, encode


def test_few_parts_stay_what_they_are():
    texts = {"b": "1", "a": "=2"}
    assert bundled(texts) == texts


@pytest.mark.parametrize("count", [MOST, MOST + 1, 10_000])
def test_many_parts_fit_into_a_packet_and_each_counts(count):
    texts = {
        f"model.{'deep.' * 60}{number:05}\N{SNOWMAN}": "=" + "9" * 48 for number in range(count)
    }
    found = bundled(texts)
    assert len(found) <= MOST
    assert len(encode(Fingerprinted(0, 0, 1, found))) < PACKET_BYTES
    for name in (min(texts), max(texts)):
        (changed,) = differences({0: found, 1: bundled({**texts, name: "=0"})})
        assert changed.by_text


def test_values_are_said_before_digests_and_suspects_first():
    of = {
        rank: {"a.weight": "0f" if rank == 1 else "0e", "lr": f"=0.{1 + (rank == 1)}"}
        for rank in range(4)
    }
    assert describe(differences(of)) == (
        "lr differs: 0.2 on rank 1, 0.1 on ranks 0, 2, 3; a.weight differs: rank 1 against ranks 0, 2, 3"
    )
    assert describe(differences(of), {3}).startswith(
        "lr differs: 0.1 on ranks 0, 2, 3, 0.2 on rank 1"
    )


@pytest.mark.parametrize(
    ("parts", "said"), [("0123", "ranks 0, 1, 2, 3"), ("0101", "ranks 0, 2 and ranks 1, 3")]
)
def test_of_what_is_cut_the_ranks_are_in_order_as_none_of_them_is_odd(parts, said):
    of = {rank: {"w": f"{PART}{part}"} for rank, part in enumerate(parts)}
    assert describe(differences(of)) == f"w is cut over {said}"


def test_what_a_rank_lacks_is_said():
    assert describe(differences({0: {"w": "1"}, 1: {}})) == "w is not registered on rank 1"


def test_more_than_two_are_counted():
    of = {0: dict.fromkeys("abcd", "1"), 1: dict.fromkeys("abcd", "2")}
    assert describe(differences(of)).endswith("; 2 more differ")
    assert differences({0: of[0], 1: of[0]}) == []
