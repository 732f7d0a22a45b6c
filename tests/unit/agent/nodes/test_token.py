"""Both sides prove that they know the token, and nothing that was said can be said again."""

import pytest

from agent.nodes.token import Proofs, Side, new_nonce, why_unproven

TOKEN = b"a token"
SIDES = list(Side)


@pytest.mark.parametrize("side", SIDES)
def test_a_side_that_knows_the_token_is_believed(side):
    proofs = Proofs("run", "1", "2")
    assert proofs.is_proven(proofs.proof(TOKEN, side), TOKEN, side)
    assert TOKEN.decode() not in proofs.proof(TOKEN, side)


@pytest.mark.parametrize(
    "other",
    [
        Proofs("other", "1", "2"),
        Proofs("run", "0", "2"),
        Proofs("run", "1", "0"),
        Proofs("run", "12", ""),
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_a_proof_is_good_for_one_connection_of_one_job(other, side):
    assert not other.is_proven(Proofs("run", "1", "2").proof(TOKEN, side), TOKEN, side)


def test_a_proof_cannot_be_handed_back():
    proofs = Proofs("run", "1", "2")
    assert not proofs.is_proven(proofs.proof(TOKEN, Side.NODE), TOKEN, Side.CONTROLLER)


@pytest.mark.parametrize("proof", ["", "ä", "\udc80", "0" * 64])
def test_without_the_token_nobody_is_believed(proof):
    assert not Proofs("run", "1", "2").is_proven(proof, TOKEN, Side.NODE)


def test_a_job_without_token_believes_only_those_without_one():
    proofs = Proofs("run", "1", "2")
    assert proofs.proof(b"", Side.NODE) == ""
    assert proofs.is_proven("", b"", Side.NODE)
    assert not proofs.is_proven(proofs.proof(TOKEN, Side.NODE), b"", Side.NODE)


@pytest.mark.parametrize(
    ("proof", "token", "words"),
    [
        ("", TOKEN, "give MSRUN_TOKEN"),
        ("x", b"", "mn1 has a token"),
        ("x", TOKEN, "token of mn1 is not"),
    ],
)
def test_a_node_hears_which_token_is_wrong(proof, token, words):
    assert words in why_unproven("mn1", proof, token)


def test_a_nonce_is_new():
    assert len({new_nonce() for _ in range(100)}) == 100
