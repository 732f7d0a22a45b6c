"""Only shadows of all ranks that have begun the same collectives belong together."""

from agent.shadows.cut_board import Cut, CutBoard

ALL = (0, 1)


def board(*made):
    found = CutBoard()
    for cut, rank, count in made:
        found = found.with_shadow(cut, rank, {"0": count})
    return found


def test_a_cut_counts_once_every_rank_has_a_shadow_of_it():
    first, second = Cut(0, 1), Cut(0, 4)
    early = board((first, 0, 3), (first, 1, 3), (second, 0, 6))
    assert early.newest(ALL) == first
    assert early.outdated(ALL) == []
    later = early.with_shadow(second, 1, {"0": 6})
    assert later.newest(ALL) == second
    assert later.outdated(ALL) == [(first, 0), (first, 1)]
    assert later.without(second, 0).newest(ALL) == first


def test_shadows_of_a_rank_whose_peers_make_none_do_not_pile_up():
    steps = [Cut(0, step) for step in range(1, 6)]
    alone = board(*((cut, 0, cut.step) for cut in steps), (steps[0], 1, 1))
    assert alone.newest(ALL) == steps[0]
    assert alone.outdated(ALL) == [(steps[1], 0), (steps[2], 0)]
    never = board(*((cut, 0, cut.step) for cut in steps))
    assert never.outdated(ALL) == [(cut, 0) for cut in steps[:3]]


def test_a_later_attempt_is_newer_although_it_repeats_steps():
    old, new = Cut(0, 9), Cut(1, 4)
    both = board((old, 0, 9), (old, 1, 9), (new, 0, 4), (new, 1, 4))
    assert both.newest(ALL) == new
    assert {cut for cut, _ in both.outdated(ALL)} == {old}


def test_ranks_that_are_not_equally_far_do_not_belong_together():
    cut = Cut(0, 2)
    uneven = board((cut, 0, 7), (cut, 1, 8))
    assert uneven.newest(ALL) is None
    assert uneven.difference(cut) == (
        "at optimizer step 2 the ranks have not begun the same number of collectives of group 0 "
        "(rank 0 7, rank 1 8)"
    )


def test_groups_of_some_ranks_are_compared_among_these():
    cut = Cut(0, 2)
    some = CutBoard().with_shadow(cut, 0, {"0": 3, "1": 5}).with_shadow(cut, 1, {"0": 3, "2": 9})
    assert some.newest(ALL) == cut
