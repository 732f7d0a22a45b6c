"""Who holds the same, and what follows if ranks do not: histories and single cases."""

from dataclasses import replace

import pytest
from support.histories import groups
from support.histories.dumps import froze
from support.histories.replacements import THREE, play
from support.histories.same import EQUAL, HISTORIES, KEPT, OTHER, OWN, says
from support.policies import altered_policy
from support.simulator import mutants
from support.simulator.mutants import believing, seeing

from agent.controller import actions as do
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.events import RankHung, fields
from agent.controller.job import Comparison
from agent.controller.protection import Level, protection
from agent.controller.states import JobState
from agent.ranks.parts import Parts, parts_of
from agent.spec.job_spec import CopyMode
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import ANEW, LATE, RESULT, UNSEEN


@pytest.mark.parametrize(
    ("rules_", "steps"),
    [row[1:] for row in (*HISTORIES, *groups.HISTORIES)],
    ids=[row[0] for row in (*HISTORIES, *groups.HISTORIES)],
)
def test_history(rules_, steps):
    play(rules_, steps)


def test_ranks_that_wait_for_each_other_behind_a_replacement_are_restarted():
    """Another new rank would wait with them, too."""
    job = play(THREE, KEPT)
    decision = decide(job, RankHung(1, 1, "waits", 60.0, is_mutual=True))
    assert (
        "after the replacement of rank 1 all ranks waited for each other: the script keeps something "
        "outside of TrainState; no rank is replaced any more"
    ) in decision.say
    assert decision.job.state is JobState.FREEZING
    for rank in (0, 2):
        decision = decide(decision.job, froze(rank, dump=2)._replace(attempt=1))
    (order,) = [each for each in decision.actions if isinstance(each, do.SaveRanks)]
    assert order.place != do.MEMORY
    # a rank that hangs by itself is replaced, and so it is once the replacement is confirmed
    assert not decide(job, RankHung(1, 1, "hangs", 60.0)).job.diverged
    for step in (6, 7):
        for rank in range(3):
            job = decide(job, says(rank, step, None, 1)).job
    assert job.since_restart.trial is None
    assert not decide(job, RankHung(1, 1, "waits", 60.0, is_mutual=True)).job.diverged


@pytest.mark.parametrize(
    ("odd", "groups"),
    [((1, 2), ((0,), (1,), (2,))), ((1,), ()), ((), ())],
    ids=["all train apart", "one of three", "none"],
)
def test_ranks_that_train_apart_after_a_while_hold_what_no_other_one_does(odd, groups):
    """A warm-up in step, then an average now and then. If most hold the same, they are right."""
    job = play(THREE, EQUAL)
    said = ""
    for step, apart in ((6, ()), (11, odd), (20, ())):  # behind an average they are alike again
        for rank in range(3):
            texts = {"model.w": f"0{rank}", "optimizer.lr": "=0.1"} if rank in apart else None
            decision = decide(job, says(rank, step, texts)._replace(is_again=True))
            job, said = decision.job, said + decision.say
    assert job.since_restart.comparison.groups == groups
    assert ("model.w differs" in said) == bool(groups)
    assert protection(job).level is (Level.PARTLY if groups else Level.PROTECTED)


def test_what_is_not_protected_is_said_once_and_at_once():
    job = play(altered_policy(THREE, copies=CopyMode.OFF), OWN[:-1])
    decision = decide(job, OWN[-1][0])
    assert decision.say.startswith("not protected: model.w differs: rank 2 against rank 0 against")
    assert "no other rank holds what rank 2 has" in decision.say
    assert decide(decision.job, says(0, 2, {"model.w": "x"})).say == ""


def test_values_of_the_scripts_own_that_differ_are_said_and_take_from_the_promise():
    def told(job, rank, step, *values):
        values = {f"{LATE}t.py:3 `best`": values[0], f"{RESULT}t.py:4 `mean`": values[1]}
        return decide(job, says(rank, step, {"model.w": "x", **values}))

    job = play(THREE, EQUAL[:1])
    for rank in range(3):
        decision = told(job, rank, 1, "a", "b" if rank else "c")
        job = decision.job
    assert decision.say == (
        "protected: a rank that dies is replaced, no step is lost as long as one rank lives; but "
        "t.py:4 `mean` differs by rank: if a rank dies between its backward and its commit, it "
        "lacks that step, and what training returns may be another; change it before backward"
    )
    for rank in range(3):
        decision = told(job, rank, 2, "a" if rank else "b", "b" if rank else "c")
        job = decision.job
    assert decision.say == (
        "partly protected: a rank that dies is replaced, no step is lost as long as one rank lives, "
        "unless it dies between its backward and its commit; but "
        "t.py:3 `best` differs by rank: if a rank dies between its backward and its commit, the "
        "step is not saved, and training resumes from the newest copy; change it before backward, "
        "or name it in state.ignore(...) if training does not depend on it"
    )
    comparison = job.since_restart.comparison
    assert (comparison.unprotected, comparison.compared) == ("", 2)


def test_copies_of_a_lost_node_are_lost_with_it():
    job = play(THREE, EQUAL[:1])
    policy = job.policy._replace(replace=job.policy.replace._replace(has_nodes=True))
    job = job._replace(policy=policy)
    for rank in range(3):
        best = {f"{LATE}t.py:3 `best`": "a" if rank else "b"}
        decision = decide(job, says(rank, 2, {"model.w": "x", **best}))
        job = decision.job
    assert (
        "the step is not saved, and training resumes from the newest copy, after the loss of a "
        "node from the newest ModelCheckpoint, else from its beginning; change it before backward"
    ) in decision.say


NONE_OF_THOSE = "or name those in state.ignore(...) on which training does not depend"


@pytest.mark.parametrize(
    ("names", "cure"),
    [
        (["buffer `net.seen`"], "change it before backward"),
        (["`best`", "buffer `net.seen`"], f"change them before backward, {NONE_OF_THOSE}"),
    ],
)
def test_that_training_does_not_depend_on_a_late_value_can_be_said_but_not_of_a_buffer(names, cure):
    job = play(THREE, EQUAL[:1])
    said = ""
    for rank in range(3):
        late = {f"{LATE}{name}": f"{rank}" for name in names}
        decision = decide(job, says(rank, 1, {"model.w": "x", **late}))
        job, said = decision.job, decision.say
    assert said.endswith(f"; {cure}")


def test_what_begins_anew_is_in_the_promise_and_takes_from_it_later():
    def anew(step, *names):
        texts = {f"{ANEW}`{each}`": "" for each in names}
        return says(0, step, texts)._replace(is_late=True, problem="a sentence")

    known = decide(play(THREE, EQUAL[:-1]), anew(1, "memory", "epsilon"))
    assert known.say == ""  # the rank has said it in its own words
    decision = decide(known.job, EQUAL[-1][0])
    whole = "a rank that dies is replaced, no step is lost as long as one rank lives"
    assert decision.say == (
        f"partly protected: {whole}, but `epsilon`, `memory` begin anew, and weights may differ"
    )
    job = play(THREE, EQUAL)
    assert protection(job).level is Level.PROTECTED
    decision = decide(job, anew(2, "memory"))
    assert decision.say == (
        f"partly protected: {whole}, but `memory` begins anew, and weights may differ"
    )
    assert decide(decision.job, anew(4, "more")).say == ""  # only once


def test_a_large_state_on_an_accelerator_is_partly_protected_until_all_of_it_was_looked_at():
    def unseen(rank, until):
        texts = {f"{UNSEEN}{until}": ""}
        return says(rank, 1, texts)._replace(is_late=True, problem="a sentence")

    job = play(THREE, EQUAL[:-1])
    for event in (unseen(0, 3), unseen(1, 4)):
        decision = decide(job, event)
        assert decision.say == ""  # what they hold is not known yet
        job = decision.job
    decision = decide(job, EQUAL[-1][0])
    assert decision.say == (
        "partly protected: a rank that dies is replaced, no step is lost as long as one rank "
        "lives, but before step 4 is complete a death costs the steps since the newest checkpoint "
        "or since training began: a large state on an accelerator is first looked at as it trains "
        "(a stop by a signal saves the step)"
    )
    seen = decide(decision.job, unseen(0, ""))
    assert seen.say == ""
    assert protection(seen.job).level is Level.PROTECTED


def test_equal_ranks_are_said_to_be_protected_once():
    job = play(THREE, EQUAL[:-1])
    decision = decide(job, EQUAL[-1][0]._replace(holds="1 module, 1 optimizer"))
    assert decision.actions == ()
    assert decision.say == (
        "protected: a rank that dies is replaced, no step is lost as long as one rank lives (checked: 1 module, 1 optimizer)"
    )
    job = decision.job
    for rank in range(3):
        again = decide(job, says(rank, 2))
        job = again.job
        assert again.say == ""
    assert decision.job.since_restart.comparison.compared == 1
    assert not decision.job.since_restart.comparison.reports


def test_an_undone_replacement_is_said_with_both_values():
    job = decide(play(THREE, KEPT), says(2, 6, None, 1)).job
    decision = decide(job, says(1, 6, OTHER, 1))
    assert "optimizer.lr differs: 0.2 on rank 1, 0.1 on rank 2" in decision.say
    assert "no rank is replaced any more" in decision.say


def test_a_large_report_is_short_in_the_journal():
    told = fields(says(0, 1))
    assert told["texts"]["parts"] == "2"
    assert told["texts"] != fields(says(0, 1, OTHER))["texts"]


def trusting(job):
    """Nobody has to show what it holds."""
    return job._replace(since_restart=job.since_restart._replace(comparison=Comparison()))


def taking_all_for_one(job):
    """Any rank can save for any other one, whatever they hold."""
    known = job.since_restart.comparison._replace(groups=(), cuts={}, parts=Parts())
    return job._replace(since_restart=job.since_restart._replace(comparison=known))


def forgetting_who_holds_it(job, event):
    """Nothing says whose parts were written."""
    decision = decide(job, event)
    actions = tuple(
        replace(each, holders=()) if isinstance(each, do.CommitDump) else each
        for each in decision.actions
    )
    return decision._replace(actions=actions)


def splitting_over_groups(job, event):
    """Each of two groups writes half of its part."""
    decision = decide(job, event)
    actions = tuple(
        replace(each, groups=()) if isinstance(each, do.SaveRanks) else each
        for each in decision.actions
    )
    return decision._replace(actions=actions)


def comparing_across_groups(job):
    """After a replacement all ranks have to hold the same, whatever their parts are."""
    return job if job.since_restart.trial is None else taking_all_for_one(job)


def replacing_the_lone(job):
    """Somebody is believed to hold the part of a rank that is alone in its group."""
    known = job.since_restart.comparison
    alone = [group for group in known.groups if len(group) == 1]
    if not alone or len(known.groups) == len(job.ranks):
        return job
    others = [group for group in known.groups if len(group) > 1]
    groups = (tuple(sorted((*alone[0], *others[0]))), *others[1:], *alone[1:])
    known = known._replace(groups=groups, parts=parts_of(len(job.ranks), groups, {}))
    return job._replace(since_restart=job.since_restart._replace(comparison=known))


def writing_again(job, event):
    """A group that is complete is ordered to write again when a writer of another one fails."""
    if isinstance(event, protocol.SaveFailed) and job.state is JobState.DUMPING:
        job = job._replace(dump=job.dump._replace(written=()))
    return decide(job, event)


def confirming_at_once(job):
    return job._replace(since_restart=job.since_restart._replace(trial=None))


def forgiving(job):
    """A script that left ranks different is replaced in again."""
    return job._replace(diverged="")


def going_on(job, event):
    """Ranks that differ after a replacement train on."""
    if isinstance(event, protocol.Fingerprinted):
        return Decision(job)
    return decide(job, event)


def giving_one_for_all(job, event):
    """Parts of the ranks' own are taken for replicas that disagree."""
    decision = decide(job, event)
    actions = tuple(
        replace(each, is_disputed=True)
        if isinstance(each, do.CommitDump) and each.holders
        else each
        for each in decision.actions
    )
    return decision._replace(actions=actions)


BROKEN = [
    (seeing(taking_all_for_one), "nobody holds|can be replaced|is due|nobody wrote|newest copy"),
    (forgetting_who_holds_it, "its holders are"),
    (splitting_over_groups, "without coverage"),
    (seeing(trusting), "do not hold the same|nobody holds|the other is due|can be replaced"),
    (seeing(confirming_at_once), "while|the memory is kept|train on|from memory"),
    (seeing(forgiving), "do not hold the same|can be replaced|the other is due"),
    (
        believing(protocol.Fingerprinted, texts={"w": "same"}),
        "nobody holds|train on|hold the same|is due|newest copy",
    ),
    (going_on, "train on|the memory is kept|could be saved|is due|nobody reads"),
    (giving_one_for_all, "part is its own"),
    (seeing(comparing_across_groups), "is alike|nobody wrote|nobody holds|they said"),
    (seeing(replacing_the_lone), "is due|do not hold the same"),
    (writing_again, "have written it"),
]


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
