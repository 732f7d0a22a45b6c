"""What another controller has to hear once more."""

from agent.hooks.standing_words import MOST_KEPT, StandingWords
from worker_hooks.contract import protocol

HELLO = protocol.Hello(2, 4, 77, "/c", wants_resume=True)
REGISTERED = protocol.Registered(2, 4, 7)


def fingerprint(step):
    return protocol.Fingerprinted(2, 4, step, {"crc32": str(step)}, False, "", "1 module")


def test_what_stays_true_is_kept_in_its_order():
    words = StandingWords()
    assert [words.hear(each) for each in (HELLO, REGISTERED, fingerprint(8))] == [True] * 3
    assert not words.hear(protocol.Leaving(2, 4))
    begun = HELLO._replace(wants_resume=False)
    assert words.of(2) == (begun, REGISTERED, fingerprint(8))
    later = REGISTERED._replace(step=9)
    words.hear(later)
    assert words.of(2) == (begun, fingerprint(8), later)
    words.hear(HELLO)  # of another process
    assert words.of(2) == (begun,)
    assert (words.ranks, words.of(3)) == ({2}, ())


def test_only_so_much_is_kept():
    words = StandingWords()
    kept = [words.hear(fingerprint(step)) for step in range(2 * MOST_KEPT)]
    assert sum(kept) == len(words.of(2)) == MOST_KEPT


def test_who_is_gone_has_said_nothing():
    words = StandingWords()
    words.hear(HELLO)
    words.drop(2)
    words.drop(3)
    assert words.of(2) == ()
    words.hear(HELLO)
    words.clear()
    assert words.ranks == set()
