"""Random schedules of cuts, deaths and returns of nodes: never two jobs go on, and all come to an end."""

import pytest
from support.node_simulator.simulation import BrokenPromiseError, Rules, simulate
from support.node_simulator.store import Store

from agent.arrivals.places import LostPlaces
from agent.launch.scheduler_watch import LostWorkers
from agent.nodes.roster import Gathering, Survivors
from agent.seat.records import NodeShare
from agent.seat.rights import GrantPlaces, NodeZeroRight, SuccessorRight

USUAL = 2_000
SCHEDULES, PARTS = 100_000, 100  # parts that the workers of pytest share


def test_some_thousand_schedules_keep_every_promise():
    began_anew = adopted = 0
    for seed in range(USUAL):
        sim = simulate(seed)
        began_anew += len(sim.jobs) > 1
        adopted += any("is adopted" in line for line in sim.story)
    # the weather is such that neither is rare
    assert began_anew > USUAL / 20
    assert adopted > USUAL / 400


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_thousand_schedules_keep_every_promise(part):
    count = SCHEDULES // PARTS
    for seed in range(part * count, (part + 1) * count):
        simulate(seed)


def test_a_seed_is_a_schedule():
    for seed in range(100):
        assert simulate(seed).story == simulate(seed).story


class HalfIsEnough(Survivors):
    def standing(self, here, doors):
        found = super().standing(here, doors)
        return NodeShare.MOST if found is NodeShare.HALF else found


class SilentIsGone(Survivors):
    def standing(self, here, doors):
        return super().standing(here, doors._replace(gone=doors.gone | doors.silent))


class NeverOutvoted(LostPlaces):
    def standing(self, _now_s):
        return NodeShare.MOST


class ForgettingTheReplaced(LostPlaces):
    def settle(self, rank):
        super().settle(rank)
        self._silences = self._silences[: len(self._silent)]


class StartedAgainWithAnybody(Gathering):
    def why_too_few(self):
        return ""


class DeafToSilence(LostWorkers):
    def why(self, doors, now_s):
        return super().why(doors._replace(silent=frozenset()), now_s)


def trains_on_in_silence(_loss, *, is_calm, is_asked):
    return is_calm and not is_asked


class WithoutAsking(NodeZeroRight):
    def judged(self, _share, _now_s):
        return [GrantPlaces()]


class ForgettingWhoMayAsk(NodeZeroRight):
    def failed(self, why, now_s):
        found = super().failed(why, now_s)
        if self.held is None:
            self._believers.clear()
            self._silent.clear()
        return found


class HalfByItself(SuccessorRight):
    def may_go_on(self, standing):
        return super().may_go_on(standing) or (standing is NodeShare.HALF and self._term != "")


class GivingToAll(Store):
    def fits(self, _after):
        return True


BESIDE = "trains step .* beside"
BROKEN = [  # the last number: a schedule that shows it, where it takes ten thousands to meet one
    ("survivors", HalfIsEnough, BESIDE, 0),
    ("survivors", SilentIsGone, BESIDE, 0),
    ("places", NeverOutvoted, BESIDE, 0),
    ("places", ForgettingTheReplaced, BESIDE, 0),
    ("gathering", StartedAgainWithAnybody, BESIDE, 15_115),
    ("node_zero", WithoutAsking, BESIDE, 0),
    ("node_zero", ForgettingWhoMayAsk, BESIDE, 0),
    ("successor", HalfByItself, BESIDE, 0),
    ("store", GivingToAll, BESIDE, 0),
    ("lost_workers", DeafToSilence, "for ever", 0),
    (
        "may_train_on",
        staticmethod(trains_on_in_silence),
        "for ever|two controllers|another controller|beside",
        15_816,
    ),
]


@pytest.mark.parametrize(
    ("rule", "mutant", "promise", "first"),
    BROKEN,
    ids=[each[0] + str(at) for at, each in enumerate(BROKEN)],
)
def test_a_broken_rule_is_noticed(rule, mutant, promise, first):
    broken = type("Broken", (Rules,), {rule: mutant})
    simulate(first)
    with pytest.raises(BrokenPromiseError, match=promise):
        for seed in (first, *range(10_000)):
            simulate(seed, broken)
