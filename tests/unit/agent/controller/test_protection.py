"""What a rank's death would cost: said when it is known, from the reasons that the ranks gave."""

from dataclasses import replace

import pytest
from support.histories import copies, groups
from support.histories.dumps import reg, running
from support.histories.plain import rules, up
from support.histories.replacements import THREE, play
from support.histories.same import EQUAL, OWN, compares, says
from support.policies import altered_policy

from agent.controller.decide import decide
from agent.controller.protection import CURES, Level, protection
from agent.ranks.parts import parts_of
from agent.spec.job_spec import CopyMode
from agent.text.tone import Tone
from worker_hooks.contract import protocol
from worker_hooks.distributed import process_group


def registered(why, policy=THREE):
    """Three ranks that hold the same, none of which can join a new group for this reason."""
    job = play(policy, EQUAL[:-1])
    for rank in range(3):
        job = decide(job, protocol.Registered(rank, 0, 0, why, True)).job
    return decide(job, EQUAL[-1][0])


def test_nothing_is_promised_before_all_have_shown_what_they_hold():
    job = play(THREE, [])
    assert protection(job).level is Level.UNKNOWN
    assert protection(play(THREE, running(3))).level is Level.UNKNOWN
    assert protection(play(THREE, EQUAL[:-1])).level is Level.UNKNOWN
    assert protection(play(THREE, EQUAL)).level is Level.PROTECTED


def test_parts_that_replica_groups_hold_are_protected_once_all_vote():
    assert protection(play(groups.MEMORY_TOO, groups.TRAINING[:-1])).level is Level.UNKNOWN
    job = play(groups.MEMORY_TOO, groups.TRAINING)
    assert protection(job).level is Level.PROTECTED


def test_who_has_to_live_is_said_of_parts_before_anybody_dies():
    """Two ranks that die at once may have been all of a replica group."""
    job = play(groups.MEMORY_TOO, groups.TRAINING)
    assert str(protection(job)).startswith(
        "protected: a rank that dies is replaced, no step is lost as long as one of each replica "
        "group lives (ranks 0, 2; ranks 1, 3)"
    )
    assert "replica group" not in str(protection(play(THREE, EQUAL)))
    since, many = job.since_restart, tuple((rank, rank + 9) for rank in range(9))
    comparison = since.comparison._replace(groups=many, parts=parts_of(18, many, {}))
    said = str(protection(job._replace(since_restart=since._replace(comparison=comparison))))
    assert "(ranks 0, 9; ranks 1, 10; ranks 2, 11; ranks 3, 12; 5 more groups)" in said


def test_a_model_that_was_sharded_inside_of_training_is_partly_protected():
    job = play(groups.MEMORY_TOO, groups.TRAINING[:-1])
    why = process_group.CUT_INSIDE
    said = str(protection(decide(job, protocol.VoteOpened(3, 0, 1, "", why)).job))
    assert said.startswith(
        "partly protected: the state is cut into 2 parts, each held by a replica group (ranks 0, 2; "
        f"ranks 1, 3), and no rank of such a job is replaced alone: rank 3: {why}; a death means"
    )
    assert said.endswith(". Shard it before run(train, state)")


def test_ranks_that_do_not_vote_say_what_that_costs():
    job = play(groups.MEMORY_TOO, groups.TRAINING[:-1])
    said = str(protection(decide(job, protocol.VoteOpened(3, 0, 1, "parts may be lost")).job))
    assert "no rank of such a job is replaced alone (parts may be lost); a death means" in said


def test_parts_of_the_ranks_own_are_not_protected():
    found = protection(play(altered_policy(THREE, copies=CopyMode.OFF), OWN))
    assert found.level is Level.NOT_PROTECTED
    assert "no other rank holds what rank 2 has" in str(found)


def test_what_begins_to_differ_later_is_said_once():
    job = play(altered_policy(THREE, copies=CopyMode.AUTO), EQUAL)
    for step in (8, 16):
        for rank in range(3):
            decision = decide(job, says(rank, step, {"ema.w": str(max(rank, 1))}))
            job = decision.job
        if step == 8:
            assert decision.say.startswith(
                "partly protected: ema.w differs: rank 2 against ranks 0, 1 (no other rank holds what rank 2 has)"
            )
    assert decision.say == ""


def test_state_that_came_later_is_not_promised_before_it_was_compared():
    job = decide(play(THREE, EQUAL), says(0, 4, {"optimizer.m": "1"}, late=True)).job
    assert protection(job).level is Level.UNKNOWN


@pytest.mark.parametrize(
    "why",
    [process_group.WRAPPED, process_group.OUTSIDE, process_group.CUT_INSIDE, process_group.EARLY],
)
def test_a_script_that_cannot_be_entered_again_is_partly_protected_and_told_the_cure(why):
    decision = registered(why)
    assert protection(decision.job).level is Level.PARTLY
    assert decision.say.startswith(f"partly protected: the script {why}; a death means save")
    ((_, cure),) = [each for each in CURES if each[0] in why]
    assert decision.say.endswith(f". {cure[0].upper()}{cure[1:]}")


def test_a_training_whose_steps_are_not_counted_is_not_protected_until_they_are():
    job = play(THREE, running(3)[:-3])  # nobody has registered
    problem = protocol.Fingerprinted(0, 0, 0, {}, False, "no step is counted", "")
    decision = decide(job, problem)
    assert decision.say.startswith("not protected: no step is counted; if a rank dies")
    job = decision.job
    for rank in range(3):
        job = decide(job, compares(rank)).job
    assert protection(job).level is Level.UNKNOWN
    for rank in range(3):
        decision = decide(job, says(rank, 1))
        job = decision.job
    assert decision.say.startswith("protected: ")


def test_a_rank_alone_has_nobody_who_holds_its_state():
    policy = altered_policy(THREE, copies=CopyMode.OFF)._replace(ranks=(0,))
    job = play(policy, running(1)[:2])
    decision = decide(job, reg(0, 0))
    assert decision.say == (
        "not protected: there is one rank only, and no other holds its state; if it is killed, "
        "training resumes from the newest ModelCheckpoint; a stop by a signal saves the step; "
        "--protect-memory=auto keeps copies of it in memory"
    )


def test_it_is_said_once_though_later_state_is_compared_again():
    job, heard = play(THREE, EQUAL[:-1]), []
    events = [EQUAL[-1][0]]
    events += [says(rank, 4, {"optimizer.m": "1"}, late=True) for rank in range(3)]
    for event in events:
        decision = decide(job, event)
        job = decision.job
        heard.append((decision.say.partition(":")[0], decision.tone))
    assert heard == [("protected", Tone.GOOD), *[("", Tone.PLAIN)] * 3]
    assert protection(job).level is Level.PROTECTED


ALONE = "there is one rank only, and no other holds its state"
OF_THEIR_OWN = "model.w differs: rank 2 against rank 0 against rank 1 (no other rank holds what"
JOBS = [
    (copies.ONE, running(1), ((0,),), ALONE),
    (copies.THREE, OWN, ((0,), (1,), (2,)), OF_THEIR_OWN),
]
of_each = pytest.mark.parametrize(
    ("rules_", "steps", "parts", "why"), JOBS, ids=["one rank", "parts of their own"]
)


@of_each
def test_that_there_will_be_copies_is_said_once_and_how_often_later(rules_, steps, parts, why):
    job = play(rules_, steps[:-1])
    assert protection(job).level is Level.UNKNOWN
    decision = decide(job, steps[-1][0])
    assert decision.say.startswith(f"partly protected: {why}")
    first = "; once a copy of it is in msrun's memory (the first is on its way), a death means a "
    assert decision.say.endswith(f"{first}restart from it")
    assert decision.tone is Tone.PLAIN
    decision = decide(decision.job, copies.copied(3, *parts))
    assert decision.say == ""
    follows = "; every step it is copied to msrun's memory, and a death means a restart from it"
    assert protection(decision.job).why.endswith(follows)


@of_each
def test_copies_that_are_never_taken_are_not_promised(rules_, steps, parts, why):
    never = copies.copied(-1, *parts, why_not="it is on no device")
    decision = decide(play(rules_, steps), never)
    assert decision.say.startswith(f"not protected: {why}")
    assert ", and it is not copied: it is on no device; if " in decision.say
    assert decision.tone is Tone.BAD
    assert decide(decision.job, never).say == ""


@of_each
def test_copies_that_end_are_not_promised_any_more(rules_, steps, parts, why):
    job = decide(play(rules_, steps), copies.copied(3, *parts)).job
    decision = decide(job, copies.copied(-1, why_not="no memory is left"))
    assert decision.say.startswith(f"not protected: {why}")
    assert "it is not copied: no memory is left" in decision.say


@of_each
@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"max_restarts": 0}, Level.PARTLY, "a death means the end of the job, once it is saved (--max-restarts=1 restarts it)"),
        ({"after_failure": False}, Level.NOT_PROTECTED, ", and nothing is saved after a failure (--on-failure)"),
        ({"copies": CopyMode.OFF}, Level.NOT_PROTECTED, "; --protect-memory=auto keeps copies of it in memory"),
    ],
    ids=["no restart", "nothing is saved", "no copies"],
)  # fmt: skip
def test_what_copies_are_worth_depends_on_the_rules(
    rules_, steps, parts, why, change, level, words
):
    job = decide(play(altered_policy(rules_, **change), steps), copies.copied(3, *parts)).job
    said = protection(job)
    assert (said.level, said.why.startswith(why), said.why.endswith(words)) == (level, True, True)


NO_NODE = "a node that dies takes its copies along, "
ENDS = "the job ends, and its steps since the newest ModelCheckpoint are lost"
GOES_ON = "training resumes from the newest ModelCheckpoint, else from its beginning"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node_wait_s": 600.0, "near": range(1)}, f"; {NO_NODE}{GOES_ON}"),
        ({"near": range(1)}, f"; {NO_NODE}{ENDS}"),
        ({"node_wait_s": 600.0, "near": range(1), "max_restarts": 0}, f"; {NO_NODE}{ENDS}"),
        ({"node_wait_s": 600.0}, f"; a worker's msrun that dies takes its copies along, {GOES_ON}"),
    ],
    ids=["another one is awaited", "none is awaited", "no restart", "started one by one"],
)
def test_what_the_death_of_a_node_costs_where_copies_are_all_there_is_is_said_before(change, words):
    policy = altered_policy(copies.THREE, has_nodes=True, **change)
    decision = decide(play(policy, OWN[:-1]), OWN[-1][0])
    assert decision.say.startswith(f"partly protected: {OF_THEIR_OWN}")
    assert decision.say.endswith(words)


def test_how_often_copies_are_taken():
    job = play(copies.ONE, running(1))
    job = decide(job, replace(copies.copied(8), every=8)).job
    assert "; about every 8 steps it is copied to msrun's memory" in str(protection(job))


@pytest.mark.parametrize(
    ("rules_", "steps", "copy"),
    [
        (rules(ranks=(0,)), running(1), copies.copied()),
        (THREE, OWN, copies.copied(5, (0,), (1,), (2,))),
    ],
    ids=["one rank", "each its own"],
)
def test_what_no_other_rank_holds_is_copied_without_being_asked(rules_, steps, copy):
    job = play(rules_, steps)
    assert "; once a copy of it is in msrun's memory" in str(protection(job))
    job = decide(job, copy).job
    assert protection(job).level is Level.PARTLY
    assert "; every step it is copied to msrun's memory, and a death means" in str(protection(job))


def test_what_can_never_be_copied_is_not_promised_to_be():
    job = play(rules(ranks=(0,)), running(1)[:2])
    decision = decide(job, reg(0)._replace(not_copied_why="it is on an accelerator"))
    assert decision.say.startswith("not protected: there is one rank only")
    assert ", and it is not copied: it is on an accelerator; if it is killed" in decision.say


def test_copies_change_nothing_for_ranks_that_replace_each_other():
    job = decide(play(altered_policy(THREE, copies=CopyMode.COPY), EQUAL), copies.copied(3)).job
    assert protection(job).level is Level.PROTECTED


def test_what_is_protected_after_a_restart_is_not_said_again():
    job = play(
        copies.ONE,
        [*copies.KILLED, (copies.saved(1), "starting", f"forget; {copies.AGAIN_FROM}", "")],
    )
    for event in (up(0, 1), reg(0, 5, 1), copies.copied(6, attempt=1)):
        decision = decide(job, event)
        job = decision.job
        assert decision.say == ""
    assert protection(job).level is Level.PARTLY


@pytest.mark.parametrize(
    ("near", "wait_s", "said"),
    [
        (range(2), 600.0, "; likewise a node, once another takes its place"),
        (range(2), 0.0, "; a node that dies ends the job, its step is saved"),
        (range(0), 600.0, "likewise a worker's msrun, once it is started again; without the sched"),
    ],
)
def test_what_the_death_of_a_node_costs_is_said_with_it(near, wait_s, said):
    job = play(THREE, EQUAL)
    more = job.policy.replace._replace(near=near, has_nodes=True, node_wait_s=wait_s)
    job = job._replace(policy=job.policy._replace(replace=more))
    assert said in str(protection(job))


def test_whose_memory_outlives_them_need_not_live():
    live = altered_policy(THREE, copies=CopyMode.LIVE)
    keepers = [(protocol.Registered(rank, 0, 0, keeper=9, board=1), "running") for rank in range(3)]
    job = play(live, [*EQUAL, *keepers])
    assert str(protection(job)).startswith(
        "protected: a rank that dies is replaced, no step is lost as long as msrun lives: what killed"
    )
    assert "as long as one rank lives" in str(protection(play(live, [*EQUAL, *keepers[:2]])))
    assert "only a copy, if all that hold" in str(protection(play(live, [*EQUAL, *keepers])))
    alone = str(protection(play(live, [*OWN, *keepers])))
    assert "its death means a restart from it" in alone
    assert alone.startswith("partly protected")


def test_what_nobody_has_asked_for_is_promised_once_it_is_known_to_be_cheap():
    auto = altered_policy(THREE, copies=CopyMode.AUTO)
    keepers = [(protocol.Registered(rank, 0, 0, keeper=9, board=1), "running") for rank in range(3)]
    cheap = [(protocol.NotesMeasured(rank, 0, 0.0003, 0.1), "running") for rank in range(3)]
    job = play(auto, [*EQUAL, *keepers, *cheap[:2]])
    assert "as long as one rank lives" in str(protection(job))
    job = decide(job, cheap[2][0]).job
    said = str(protection(job))
    assert "no step is lost as long as msrun lives: what killed ranks leave" in said
    assert "only the newest checkpoint, if all that hold a part are killed amid an update" in said
    job = decide(job, protocol.NotesMeasured(1, 0, 0.01, 0.1)).job
    assert (
        "no step is lost as long as one rank lives; what killed ranks leave in their memory is not "
        "read: to note where the state lies takes 10.00% of a step, more than 0.5%"
    ) in str(protection(job))


def test_where_copies_are_all_that_there_is_it_is_said_why_memory_is_not_read():
    auto = altered_policy(THREE, copies=CopyMode.AUTO)
    told = protocol.Registered(1, 0, 0, not_kept_why="Slurm may count it twice")
    job = play(auto, [*OWN, (told, "running"), (copies.copied(1, (0,), (1,), (2,)), "running")])
    said = str(protection(job))
    assert said.startswith("partly protected")
    assert said.endswith(
        "; what killed ranks leave in their memory is not read: Slurm may count it twice"
    )
