"""Random schedules of jobs whose ranks hold each tensor with others: a step is saved if each box of it is held."""

from dataclasses import replace

import pytest
from support.simulator import mutants
from support.simulator.node import census, simulate, too_rare

from agent.controller import actions as do
from agent.controller.decide import decide
from agent.ranks.parts import Part, seated
from worker_hooks.contract import protocol

SCHEDULES, PARTS = 100_000, 50  # parts that the workers of pytest share
SEEN = {  # at least so many times in 12,000
    2_000: ("in several parts",),
    200: ("written again", "let on", "no majority"),
    20: ("ReplaceRanks", "odd"),
    6: ("replaced",),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_ranks_share_a_step_is_saved_if_each_box_is_held(part):
    count = SCHEDULES // PARTS
    seen = census(part * count, count, has_boxes=True)
    assert seen["Finish"] == count
    assert too_rare(seen, SEEN, count) == []


@pytest.mark.parametrize(
    "seed",
    [
        5563,  # the last rank that can be asked is killed, a copy is older than what memory holds
        60068,  # one hangs once the dump in memory has failed: what ranks hold is read, as before that
        94232,
    ],
)
def test_schedules_that_once_ended_badly_do_so_no_more(seed):
    simulate(seed, has_boxes=True)


def with_parts(job, every):
    known = job.since_restart.comparison
    parts = seated(len(job.ranks), every)
    return job._replace(
        since_restart=job.since_restart._replace(comparison=known._replace(parts=parts))
    )


def finding(parts):
    """Other parts are found in what ranks report."""

    def mutant(job, event):
        decision = decide(job, event)
        known = decision.job.since_restart.comparison
        is_news = isinstance(event, protocol.Fingerprinted) and decision.job is not job
        if not is_news or not known.parts.are_shared:
            return decision
        return decision._replace(job=with_parts(decision.job, parts(known)))

    return mutant


def whole_ranks(known):
    """A rank that is dead takes all that it held along, as if no two others had it together."""
    return tuple(map(Part, known.groups))


def all_but_one(known):
    return known.parts.every[1:]


def all_of_each_rank(known):
    """What other ranks hold counts in each part."""
    return tuple(Part(part.ranks) for part in known.parts.every)


def nothing_of_one(known):
    every = known.parts.every
    return (Part(every[0].ranks, tuple("abcd")), *every[1:])


def a_neighbours(known):
    """One rank more is thought to hold a part."""
    every = known.parts.every
    ranks = {*every[0].ranks}
    more = next((part.ranks[-1] for part in every if not {*part.ranks} & ranks), None)
    if more is None:
        return every
    return (Part(tuple(sorted({*ranks, more})), every[0].without), *every[1:])


def blaming_the_wrong_seat(job, event):
    """An answer about one part is taken for one about the first."""
    if isinstance(event, protocol.Written | protocol.Digested) and event.share:
        event = event._replace(share=0)
    return decide(job, event)


def naming_seats(job, event):
    """The manifest is told seats for ranks."""
    decision = decide(job, event)
    actions = tuple(
        replace(each, holders=decision.job.since_restart.comparison.parts.seats)
        if isinstance(each, do.CommitDump) and len(each.holders) > 1 and not each.is_disputed
        else each
        for each in decision.actions
    )
    return decision._replace(actions=actions)


BROKEN = [
    (finding(whole_ranks), "the holders are|could be saved|can be replaced|other is due"),
    (finding(all_but_one), "the newest step|nobody wrote"),
    (finding(all_of_each_rank), "the holders are|they said|disputed"),
    (finding(nothing_of_one), "nobody wrote"),
    (finding(a_neighbours), "the newest step|they said"),
    (blaming_the_wrong_seat, "could be saved|without coverage|have not said"),
    (naming_seats, "its holders are"),
]


@mutants.cases(BROKEN)
def test_a_controller_that_takes_parts_for_others_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise, has_boxes=True)
