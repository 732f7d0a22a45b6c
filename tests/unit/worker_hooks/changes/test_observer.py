"""What is noticed of tensors that change between a commit and the next update, and what of it is kept."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import vector_to_parameters

from worker_hooks.changes import audit, copies, observer
from worker_hooks.changes.content import digest, is_same, sample
from worker_hooks.changes.observer import Audited, ChangeObserver


class Steps:
    """Steps of a training that holds three tensors, one of which is large."""

    def __init__(self, share=0.5, large=60_000, known=((), None)):
        torch.manual_seed(1)
        self.tensors = {
            "first": torch.randn(5),
            "second": torch.randn(4, 6).t(),
            "large": torch.randn(large),
        }
        self.changes = ChangeObserver(lambda: [self.tensors])
        self.changes.expect(*known)
        self.changes.begin(share)
        self.step, self.held = 0, self.changes.commit(0)
        self.changes.committed(self.held)

    def train(self, before=None, after=None, count=1):
        """Steps that change something in front of and behind their updates."""
        for _ in range(count):
            if before is not None:
                before(self.tensors)
            self.changes.update_begins(self.held)
            for each in self.tensors.values():
                each.mul_(0.99)
            self.changes.updated()
            if after is not None:
                after(self.tensors)
            self.changes.step_ends(self.held, is_step=True)
            self.step += 1
            self.held = self.changes.commit(self.step)
            self.changes.committed(self.held)
        return self.held


CHANGES = {
    "in place": lambda t: t["second"].add_(1),
    "data": lambda t: t["second"].data.add_(1),
    "other data": lambda t: setattr(t["second"], "data", t["second"].data + 1),
    "numpy": lambda t: t["second"].numpy().__iadd__(1),
    "a vector": lambda t: vector_to_parameters(
        torch.full((24,), 2.0 + t["first"][0]), [t["second"]]
    ),
    "one bit": lambda t: t["second"].numpy().T.view("uint8").__ixor__(1),
}


@pytest.mark.parametrize("way", CHANGES)
def test_what_changes_at_the_top_of_steps_is_copied_from_then_on(way):
    steps = Steps()
    assert steps.held.copies.keys() == steps.tensors.keys()  # nothing is known yet
    steps.train(CHANGES[way], count=audit.FIRST_STEPS)
    assert steps.changes.changing == ["second"]
    held = steps.train(CHANGES[way])
    assert list(held.copies) == ["second"]
    before = {name: each.clone() for name, each in steps.tensors.items()}
    CHANGES[way](steps.tensors)
    assert is_same(held.copies["second"], before["second"])
    assert steps.changes.changed(held) == set()
    assert steps.changes.why_unknown(held) == ""


def test_what_changed_once_is_not_copied_for_ever():
    steps = Steps()
    steps.train(CHANGES["in place"])
    assert list(steps.train(count=audit.FIRST_STEPS).copies) == ["second"]
    assert steps.train(count=observer.STILL_STEPS).copies == {}
    assert list(steps.train(CHANGES["in place"]).copies) == ["second"]


def test_what_changed_uncounted_is_copied_for_ever():
    steps = Steps()
    steps.train(CHANGES["data"])
    assert list(steps.train(count=audit.FIRST_STEPS + observer.STILL_STEPS).copies) == ["second"]


def test_of_what_changes_in_updates_alone_nothing_is_copied():
    steps = Steps()
    held = steps.train(count=audit.FIRST_STEPS)
    assert held.copies == {}
    assert steps.changes.changing == []
    assert steps.changes.sees_all
    steps.tensors["first"].add_(1)
    assert steps.changes.changed(held) == {"first"}  # none saves it now


def test_a_change_that_comes_late_is_found_by_samples():
    steps = Steps(share=1.0)
    steps.train(count=audit.FIRST_STEPS)
    for _ in range(2000):
        steps.train(CHANGES["data"])
        if steps.changes.changing:
            break
    assert steps.changes.changing == ["second"]


def test_without_an_audit_only_counted_changes_are_seen():
    steps = Steps(share=0)
    assert steps.held.copies == {}
    steps.train(CHANGES["data"], count=5)
    assert steps.changes.changing == []
    assert steps.train(CHANGES["in place"]).copies.keys() == {"second"}


def test_a_reader_meanwhile_is_told_of_an_uncounted_change(monkeypatch):
    """Another thread may read the state until the update begins, also while changes are looked for."""
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 0)
    steps, found = Steps(), []
    hidden = steps.changes._hidden

    def looking(held):
        found.append(steps.changes.changed(held))
        return hidden(held)

    monkeypatch.setattr(steps.changes, "_hidden", looking)
    CHANGES["numpy"](steps.tensors)
    steps.changes.update_begins(steps.held)
    assert found == [{"second"}]
    assert not steps.changes.is_open


def test_what_changes_uncounted_behind_the_update_is_no_complete_step():
    steps = Steps()
    steps.train(after=CHANGES["in place"], count=audit.FIRST_STEPS)
    assert steps.changes.sees_all
    steps = Steps()
    steps.train(after=CHANGES["data"], count=audit.FIRST_STEPS)
    assert not steps.changes.sees_all


def large_steps(monkeypatch):
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 1000)
    steps = Steps()
    assert steps.held.copies == {}
    return steps


def test_of_a_large_state_all_of_the_content_is_looked_at_in_the_first_steps(monkeypatch):
    steps = large_steps(monkeypatch)
    for _ in range(audit.FIRST_STEPS):
        assert steps.changes.why_unknown(steps.held) == ""
        assert steps.changes.changed(steps.held) == set()
        steps.train()
    assert steps.changes.why_unknown(steps.held) == ""


@pytest.mark.parametrize("way", CHANGES)
def test_what_changes_in_the_first_steps_of_a_large_state_is_seen_at_once(monkeypatch, way):
    steps = large_steps(monkeypatch)
    steps.train()
    CHANGES[way](steps.tensors)
    assert steps.changes.changed(steps.held) == {"second"}


def test_a_large_state_is_not_known_while_it_is_first_looked_at(monkeypatch):
    steps = large_steps(monkeypatch)
    steps.step += 1
    held = steps.changes.commit(steps.step)
    assert steps.changes.why_unknown(held) == observer.UNSEEN
    steps.changes.committed(held)
    assert steps.changes.why_unknown(held) == ""


def test_what_has_changed_uncounted_as_an_update_of_a_large_state_begins_is_not_known(monkeypatch):
    steps = large_steps(monkeypatch)
    CHANGES["data"](steps.tensors)
    steps.changes.update_begins(steps.held)
    assert "torch does not count how second changes" in steps.changes.why_unknown(steps.held)


def test_a_large_state_is_known_from_an_update_on_that_found_it_unchanged(monkeypatch):
    steps = large_steps(monkeypatch)
    steps.changes.update_begins(steps.held)
    assert steps.changes.why_unknown(steps.held) == ""


def test_a_large_state_is_not_known_where_its_content_was_not_all_looked_at(monkeypatch):
    steps = large_steps(monkeypatch)
    steps.changes.baseline = audit.Baseline(steps.tensors, {"second": 0.5})
    assert steps.changes.why_unknown(steps.held) == observer.UNSEEN
    steps.changes.baseline = audit.Baseline({"second": steps.tensors["second"]}, None)
    assert steps.changes.why_unknown(steps.held) == observer.UNSEEN


def test_what_of_a_large_state_changes_uncounted_is_copied_from_then_on(monkeypatch):
    steps = large_steps(monkeypatch)
    held = steps.train(CHANGES["data"], count=audit.FIRST_STEPS - 1)
    assert list(held.copies) == ["second"]
    assert steps.changes.why_unknown(held) == ""
    held = steps.train(CHANGES["data"])
    assert steps.changes.why_unknown(held) == ""


@pytest.mark.parametrize(
    ("way", "said", "why"),
    [
        ("in place", "a death in the part of a step in which second changes loses that step", ""),
        (
            "data",
            "nothing of this training can be saved any more: second changes outside of updates",
            "torch does not count how second changes outside of updates",
        ),
    ],
)
def test_what_has_no_room_for_copies_is_said_at_once(monkeypatch, caplog, way, said, why):
    monkeypatch.setattr(copies, "free_bytes", lambda: 100)
    monkeypatch.setattr(copies, "FREE_BYTES", 10)
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 0)
    steps = Steps()
    with caplog.at_level(logging.WARNING, "msrun"):
        held = steps.train(CHANGES[way], count=audit.FIRST_STEPS + 2)
    (line,) = caplog.messages
    assert said in line and "have no room in memory" in line
    assert held.copies == {}
    assert steps.changes.why_unknown(held) == why


def test_copies_that_take_too_long_are_given_up_the_largest_first(monkeypatch):
    made = copies.CommitCopies()
    tensors = {name: torch.zeros(size << 18) for name, size in (("a", 1), ("b", 4), ("c", 8))}
    made.add(tensors, tensors)
    clock = iter(range(10**6))
    monkeypatch.setattr(copies, "perf_counter", lambda: next(clock) / 1000)  # 1 ms for all
    for step in range(copies.LOOKS):
        assert made.take(step, tensors, made.names).keys() == tensors.keys()
        made.keep_to_budget(0.01, tensors)
    assert made.names == {"a"}
    assert set(made.refused.values()) == {"copies at each commit would take 10% of a step"}


def test_what_one_rank_has_audited_another_one_need_not(monkeypatch):
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 1000)
    old = Steps()
    assert old.changes.audited is None
    uncounted = CHANGES["numpy"]
    old.train(uncounted, uncounted, count=audit.FIRST_STEPS)
    known = Audited(*json.loads(json.dumps(old.changes.audited)))
    assert known == Audited(["second"], has_unseen=True)
    new = Steps(known=(old.changes.changing, known))
    assert list(new.held.copies) == ["second"]
    assert new.changes.baseline is None
    assert new.changes.why_unknown(new.held) == ""
    assert not new.changes.sees_all
    uncopied = new.held._replace(copies={})
    assert "does not count how second changes" in new.changes.why_unknown(uncopied)


def test_all_is_copied_where_steps_halt_behind_their_update():
    steps = Steps()
    steps.train(CHANGES["in place"], count=audit.FIRST_STEPS)
    assert list(steps.held.copies) == ["second"]
    steps.changes.keep_all()
    held = steps.train(count=observer.STILL_STEPS)  # also where nothing else needs it
    assert held.copies.keys() == steps.tensors.keys()
    before = {name: each.clone() for name, each in steps.tensors.items()}
    steps.changes.update_begins(held)
    for each in steps.tensors.values():
        each.zero_()
    assert steps.changes.changed(held) == set()
    assert all(is_same(held.copies[name], each) for name, each in before.items())


@pytest.mark.parametrize("limit", ["share", "size", "memory"])
def test_a_part_of_all_copies_is_not_made_and_this_is_said(monkeypatch, caplog, limit):
    steps = Steps()
    steps.train(CHANGES["in place"], count=audit.FIRST_STEPS)
    steps.changes.keep_all()
    if limit == "size":
        monkeypatch.setattr(observer, "COPIED_AT_FIRST", 1000)
    else:
        monkeypatch.setattr(copies, "FREE_BYTES", 1000)
    if limit == "share":
        monkeypatch.setattr(copies, "SHARE", 0.0)
    else:
        monkeypatch.setattr(copies, "free_bytes", lambda: 1000 * (limit == "size"))
    with caplog.at_level(logging.WARNING, "msrun"):
        held = steps.train(CHANGES["in place"], count=2 * copies.LOOKS)
    assert list(held.copies) == ["second"]
    assert "a step is lost if a rank dies while others wait in a collective" in caplog.text
    assert len(caplog.messages) == 1


def test_each_reason_for_copies_that_are_not_made_is_said_once(monkeypatch, caplog):
    steps = Steps()
    steps.train(CHANGES["in place"], count=audit.FIRST_STEPS)
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 1000)
    with caplog.at_level(logging.WARNING, "msrun"):
        for _ in range(3):
            steps.changes.keep_all("between: %s")
            steps.changes.keep_all("communicates: %s")
            steps.train(CHANGES["in place"])
    assert [line.partition(":")[0] for line in caplog.messages] == ["between", "communicates"]


def test_a_large_state_is_not_copied_to_find_that_it_is_one(monkeypatch):
    """A new rank's first commit is in front of the first step that all can make again."""
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 1000)
    copied, take = [], copies.CommitCopies.take

    def taking(self, step, tensors, names):
        found = take(self, step, tensors, names)
        copied.extend(found)
        return found

    monkeypatch.setattr(copies.CommitCopies, "take", taking)
    steps = Steps()
    steps.changes.keep_all("", 0.01)
    steps.train(count=3)
    assert copied == []


def test_what_may_take_less_than_the_usual_share_ends_without_a_word(caplog):
    steps = Steps()
    steps.train(CHANGES["in place"], count=audit.FIRST_STEPS)
    steps.changes.keep_all("", 1e-9)
    with caplog.at_level(logging.WARNING, "msrun"):
        held = steps.train(CHANGES["in place"], count=2 * copies.LOOKS)
    assert list(held.copies) == ["second"]
    assert caplog.messages == []
    steps.changes.keep_all()  # now steps halt: that may take more
    held = steps.train(CHANGES["in place"], count=2)
    assert held.copies.keys() == steps.tensors.keys()


def test_what_nobody_needs_any_more_is_not_copied_unless_steps_halt():
    for halts in (False, True):
        steps = Steps()
        steps.train(CHANGES["in place"], count=audit.FIRST_STEPS)
        steps.changes.keep_all("", 0.01)
        if halts:
            steps.changes.keep_all()
        held = steps.train(CHANGES["in place"], count=2)
        assert held.copies.keys() == steps.tensors.keys()
        steps.changes.keep_less()
        held = steps.train(CHANGES["in place"], count=2)
        assert held.copies.keys() == (steps.tensors.keys() if halts else {"second"})


def test_the_copies_of_the_commit_before_stay_as_they_were():
    made, tensor = copies.CommitCopies(), torch.zeros(3)
    first = made.take(1, {"a": tensor}, ["a"])
    tensor.add_(1)
    second = made.take(2, {"a": tensor}, ["a"])
    assert (first["a"].tolist(), second["a"].tolist()) == ([0, 0, 0], [1, 1, 1])


def test_weights_that_are_exchanged_behind_a_loop_are_noticed():
    steps = Steps()
    held = steps.train(count=audit.FIRST_STEPS + 1)
    steps.changes.baseline = None  # as in most steps
    steps.changes.leave_loop(held)
    assert steps.changes.changed(held) == set()
    steps.tensors["large"].data.add_(1)
    assert steps.changes.changed(held) == {"large"}
    steps.tensors["large"].data.sub_(1)


def test_a_failure_ends_no_training():
    steps = Steps()
    steps.tensors = {**steps.tensors, "odd": SimpleNamespace()}
    steps.changes.updated()
    assert "looking for changes of the state failed" in steps.changes.why_unknown(steps.held)
    assert not steps.changes.sees_all


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(300, 70),
        lambda: torch.randn(8, 3, 40, 40).to(memory_format=torch.channels_last),
        lambda: torch.randn(90, 80)[::2, 1:],
        lambda: torch.randn(50, dtype=torch.complex64).conj(),
        lambda: torch.rand(70_000) > 0.5,
        lambda: torch.randn(20).to(torch.float8_e4m3fn),
        lambda: torch.empty(0),
        lambda: torch.full((3,), torch.nan),
    ],
)
def test_content_differs_if_any_element_does(make):
    tensor = make()
    other = tensor.clone()
    assert is_same(tensor, other) and digest(tensor) == digest(other)
    assert sample(tensor, 0.3) == sample(tensor, 0.3)
    if tensor.numel():
        flat = other.view(torch.uint8) if other.itemsize == 1 else other
        flat[..., -1] = 1 - flat[..., -1] if flat.dtype is torch.uint8 else 7
        assert not is_same(tensor, other) and digest(tensor) != digest(other)
