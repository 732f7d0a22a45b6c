"""Observes where the registered tensors change, so that nobody reads them where they may be wrong.

Between a commit and the next update live memory may be read as the state of that commit only if it
does not change there. What was seen to change there is copied at each commit from then on, and the
copy is read. In the first steps nothing was seen yet: then everything is copied, if it is small.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from time import perf_counter
from typing import Concatenate, NamedTuple, ParamSpec

from torch import Tensor

from worker_hooks.changes.audit import AuditSchedule, Baseline
from worker_hooks.changes.content import is_same, nbytes
from worker_hooks.changes.copies import SHARE, CommitCopies
from worker_hooks.changes.loop_end_copies import LoopEndCopies
from worker_hooks.changes.versions import TensorList, Versions, read
from worker_hooks.device import devices

log = logging.getLogger("msrun")

COPIED_AT_FIRST = 256 << 20
"""Bytes: up to this size all of the state is copied, at first and where steps may halt."""

HALTS = (
    "a step is lost if a rank dies while others wait in a collective behind their update, and have "
    "yet to change weights or averages there: %s"
)

UNSEEN = (
    "in its first steps msrun has yet to see what changes outside of updates, and the state is too "
    "large to be copied"
)

STILL_STEPS = 64
"""After so many steps without a counted change nothing is copied because of such changes.

If there is one again, a death in that part of the step loses the step, and it is copied again.
"""

_SHOWN = 3  # names in a message


class Audited(NamedTuple):
    """What complete audits have found; the same script changes the same on all ranks."""

    uncounted: Collection[str]  # tensors that change outside of updates, and torch does not say so
    has_unseen: bool  # something changes so between an update and its commit


class CommittedTensors(NamedTuple):
    """The registered tensors as of a commit."""

    versions: Versions
    copies: Mapping[str, Tensor]  # of those that may change before the next update


Parameters = ParamSpec("Parameters")


def _stepping_aside(
    observe: Callable[Concatenate[ChangeObserver, Parameters], None],
) -> Callable[Concatenate[ChangeObserver, Parameters], None]:
    """Let no failure into the training: it means that nothing is known of the state any more."""

    @functools.wraps(observe)
    def observing(
        self: ChangeObserver, /, *args: Parameters.args, **options: Parameters.kwargs
    ) -> None:
        try:
            observe(self, *args, **options)
        except Exception as error:
            self.give_up(f"looking for changes of the state failed: {error!r}")
            log.exception("observing changes of the state")

    return observing


class ChangeObserver:
    """Called by the main thread; the listener calls only what says so.

    In most steps there is nothing to do behind an update, and before and behind a commit: see
    :attr:`is_open`, :attr:`baseline` and :attr:`wants_audit`, and save the call.
    """

    def __init__(self, parts: Callable[[], list[Mapping[str, Tensor]]]) -> None:
        """Observe nothing but versions before :meth:`begin`.

        Args:
            parts: returns the registered tensors by name, in parts: the same objects as before as
                long as they hold the same tensors.
        """
        self._parts = parts
        self._list = TensorList()
        self._copies = CommitCopies()
        self._between = LoopEndCopies()
        self._begun: Versions | None = None  # as a loop began, if that was behind the commit
        self._audit = AuditSchedule(0)
        self._versions: Versions | None = None
        self._is_begun = False
        self.is_open = False
        """Whether no update has begun since the commit."""
        self.baseline: Baseline | None = None
        """The content as of the commit, in a step that is audited."""
        self.wants_audit = False
        """Whether the step that begins is to be audited: :meth:`committed` has something to do."""
        self._behind: Baseline | None = None  # as of the last update, in a step that is audited
        self._behind_versions: Versions | None = None
        self._committed_at = 0.0
        self._step_s = 0.0
        self._expected: frozenset[str] = frozenset()  # known to change, from an earlier life
        self._is_audited = False  # by a rank that lives
        self._uncounted: set[str] = set()
        self._still = 0  # steps in a row without a counted change outside of updates
        self._said: set[str] = set()
        self._keeps_all = False  # copies of all are made at each commit
        self._reasons: dict[str, float] = {}  # why, and the share of a step's time for that
        self._given_up: set[str] = set()  # the reasons for which all was to be copied in vain
        self._needed: set[str] = set()  # and these were, or would be, without that
        self._has_unseen = False  # something changed uncounted between an update and its commit
        self._blind_why = ""  # why nothing can be known of the state
        self._has_uncopied = False  # not all of the newest commit was copied
        self.keeps_host = False
        """Whether what is in host memory is copied at each commit: the rest is on an accelerator,
        which may hold a commit that the host is past."""
        self.is_idle = False
        """Whether no accelerator has anything to do, so that what it holds may be looked at; set by
        the listener. Otherwise a device may wait for what never comes."""
        self._on_host: frozenset[str] = frozenset()
        self._seen: Mapping[str, Tensor] = {}  # of which that was found out

    @property
    def is_auditing(self) -> bool:
        """Whether content is looked at."""
        return self._audit.share > 0

    @property
    def sees_all(self) -> bool:
        """Whether all that changes between an update and its commit is counted, as far as seen."""
        return not (self._audit.is_first or self._has_unseen or self._blind_why)

    def begin(self, share: float) -> None:
        """From now on copy what changes elsewhere, and audit within this share of the time.

        ``share``: 0: no audit; what versions do not show is not noticed.
        """
        if not self._is_begun:
            is_known = self._is_audited
            self._is_begun, self._audit = True, AuditSchedule(share, is_known=is_known)
            self._committed_at = perf_counter()

    def forget(self) -> None:
        """There is no commit any more: the state was replaced."""
        self._versions = self.baseline = self._behind = self._begun = None
        self.is_open = False

    def expect(self, names: Iterable[str], audited: Audited | None = None) -> None:
        """These were seen to change outside of updates, in an earlier life of this training.

        ``audited``: of a rank that lives; its audits need not be repeated.
        """
        self._expected = frozenset(names)
        if audited is not None:
            self._is_audited = True
            self._uncounted |= set(audited.uncounted)
            self._has_unseen |= audited.has_unseen

    @property
    def audited(self) -> Audited | None:
        """What another rank may :meth:`expect`; for the listener."""
        if not self.is_auditing or self._audit.is_first:
            return None
        return Audited(sorted({*self._uncounted}), self._has_unseen)

    def give_up(self, why: str) -> None:
        """Nothing of the state is known from now on; say so once."""
        if not self._blind_why:
            self._blind_why = why
            log.warning("nothing of this training can be saved any more: %s", why)

    def unseen_steps(self) -> int:
        """How many steps more nothing is known of what an accelerator holds once a rank has died.

        Its content would have to be compared, and a device that waits for the dead one's part does
        nothing else for sure. What is copied needs no comparison.
        """
        return self._audit.first_left if self.keeps_host and self._has_uncopied else 0

    @property
    def has_unseen(self) -> bool:
        """Whether something was seen to change uncounted between an update and its commit."""
        return self._has_unseen

    def keep_all(self, else_why: str = HALTS, share: float = SHARE) -> None:
        """From now on copy all of the state at each commit, if it is small and that is cheap.

        Steps were seen to halt behind their update, in a collective, with changes yet to be made,
        or between two updates. Such a step is no state to resume from, so the commit before must
        stay one. What was found to be too large or too dear is not tried again.

        Args:
            else_why: what it means if that is not so, with a place for the reason; empty: nothing.
            share: of a step's time that this may take; the largest of several counts.
        """
        if else_why in self._given_up:
            return  # the next commit would give it up again
        self._reasons[else_why] = max(share, self._reasons.get(else_why, 0.0))
        if not self._keeps_all:
            self._keeps_all, self._needed = True, {*self._copies.names}

    def keep_less(self) -> None:
        """The reason is gone for which all was to be copied within less than the usual share."""
        if self._keeps_all and self._share < SHARE:
            self._stop_keeping_all(self._copies.names - self._needed)

    def _stop_keeping_all(self, extra: AbstractSet[str]) -> None:
        self._keeps_all = False
        self._reasons.clear()
        self._copies.let_go(extra)

    @property
    def _share(self) -> float:
        return max(self._reasons.values(), default=0.0)

    @property
    def changing(self) -> list[str]:
        """The names of what was seen to change outside of updates."""
        return sorted({*self._copies.names, *self._copies.refused})

    # --- a step, as the main thread goes through it -----------------------------------------------

    def commit(self, step: int) -> CommittedTensors:
        """A commit: read the versions, copy what has to be copied."""
        now = perf_counter()
        self._step_s, self._committed_at = now - self._committed_at, now
        try:
            tensors = self._list.join(self._parts())
        except Exception as error:  # noqa: BLE001  the script's own code
            self.give_up(f"its state cannot be read: {error!r}")
            tensors = {}
        if self._expected and tensors.keys() >= self._expected:
            self._copies.add(self._expected, tensors)
            self._expected = frozenset()
        if self.keeps_host and tensors is not self._seen:
            self._seen = tensors
            here = (name for name, each in tensors.items() if devices.is_on_host(each))
            self._on_host = frozenset(here)
            self._copies.add(self._on_host, tensors)
        if self._keeps_all and not self._copies.names >= tensors.keys():
            self._keep_all_or_less(tensors)  # a large state is not copied to find that it is one
            if self._keeps_all:
                self._copies.add(tensors, tensors)
        is_all = self._audit.is_first and nbytes(tensors.values()) <= COPIED_AT_FIRST
        names = tensors.keys() if is_all else self._copies.names
        copies = self._copies.take(step, tensors, names) if names else {}
        self._has_uncopied = not copies.keys() >= tensors.keys()
        self._versions = versions = read(tensors, self._versions)
        self.is_open, self.baseline, self._behind = self._is_begun, None, None
        self._begun = None
        audit = self._audit
        self.wants_audit = audit.is_first or (audit.share > 0 and audit.is_due(self._step_s))
        if copies and not is_all:
            self._copies.keep_to_budget(self._step_s, tensors)
        if self._keeps_all:
            self._keep_all_or_less(tensors)
        self._say_refused()
        return CommittedTensors(versions, copies)

    def _keep_all_or_less(self, tensors: Mapping[str, Tensor]) -> None:
        """A part of the copies is of no use: make all of them, or those that were made before."""
        extra = tensors.keys() - self._needed
        refused = [why for name, why in self._copies.refused.items() if name in extra]
        if nbytes(tensors.values()) > COPIED_AT_FIRST:
            refused.append(f"all of the state is larger than {COPIED_AT_FIRST >> 20} MiB")
        if (share := self._copies.share) > self._share and self._share < SHARE:
            refused.append(f"copies at each commit take {share:.0%} of a step")
        if refused:
            self._given_up |= self._reasons.keys()
            for why in filter(None, self._reasons):
                log.warning(why, refused[0])
            self._stop_keeping_all(extra)

    def committed(self, held: CommittedTensors) -> None:
        """Behind a commit: look at the content, if the step that begins is to be audited."""
        if self.is_open and self.wants_audit:
            self._begin_audit(held)

    @_stepping_aside
    def _begin_audit(self, held: CommittedTensors) -> None:
        tensors = held.versions.tensors
        if self._audit.is_first:
            left = {name: each for name, each in tensors.items() if name not in held.copies}
            self.baseline = Baseline(left, None)
        elif places := self._audit.places(tensors):
            self._look(tensors, places)

    @_stepping_aside
    def leave_loop(self, held: CommittedTensors) -> None:
        """A loop is over, at a commit: who knows what the script exchanges for its validation."""
        if self.is_auditing and self.is_open and self.baseline is None:
            names = held.versions.tensors.keys() - held.copies.keys()
            self._look(held.versions.tensors, self._audit.some_places(names))

    @_stepping_aside
    def begin_loop(self, held: CommittedTensors) -> None:
        """A loop begins: what has changed since the commit is no sign of what steps change."""
        versions = held.versions
        if replaced := versions.replaced(self._joined()):
            self._between.note_exchanged(replaced)
        if versions.has_moved:
            self._between.note_exchanged(versions.moved())
            self._begun = read(versions.tensors, versions)

    def copies_between_loops(
        self, held: CommittedTensors, names: AbstractSet[str], weights: AbstractSet[str]
    ) -> dict[str, Tensor]:
        """A loop is over: copies of what the script may change until the next.

        Args:
            names: of the tensors that may be saved from copies.
            weights: of these, those that are not of optimizers.
        """
        tensors, versions = held.versions.tensors, held.versions
        left = {name: tensors[name] for name in tensors.keys() & names - held.copies.keys()}
        if not (self.is_open and left) or versions.has_moved or versions.replaced(self._joined()):
            return {}
        return self._between.take(left, weights)

    def moved_in_step(self, held: CommittedTensors) -> set[str]:
        """What was changed since the commit, and not before the loop began; for the listener."""
        return (self._begun or held.versions).moved()

    def _joined(self) -> dict[str, Tensor]:
        return self._list.join(self._parts())

    def _look(self, tensors: Mapping[str, Tensor], places: Mapping[str, float]) -> None:
        began = perf_counter()
        self.baseline = Baseline(tensors, places)
        self._audit.note_cost(began, len(places))

    @_stepping_aside
    def update_begins(self, held: CommittedTensors | None) -> None:
        """The first update of a step begins: what changed since the commit, changed elsewhere."""
        if not self.is_open or held is None:
            return
        try:
            self._find_changed(held)
        finally:
            self.is_open = False  # last: a reader in another thread looks itself until then

    def _find_changed(self, held: CommittedTensors) -> None:
        versions = self._begun or held.versions
        found = versions.moved() if versions.has_moved else set()
        self._still = 0 if found else self._still + 1
        self._needed |= found
        if self._still == STILL_STEPS and not self._keeps_all:
            # what changed once or seldom, as in the first step
            self._copies.names &= self._uncounted | self._on_host
        if self.baseline is not None:
            found |= self._hidden(held)
            if self._audit.is_first and self._audit.note_complete():
                self._copies.drop_others()
        if found and (new := self._copies.add(found, versions.tensors)):
            log.info("changed outside of updates, and copied at each commit: %s", _listed(new))
            self._say_refused()

    @_stepping_aside
    def updated(self) -> None:
        """Behind an update: look at the content again, if this step is audited."""
        if self.baseline is None:
            return
        tensors = self._list.join(self._parts())
        places = self.baseline.places
        self._behind = Baseline(tensors, places)
        self._behind_versions = read(tensors)

    @_stepping_aside
    def step_ends(self, held: CommittedTensors | None, *, is_step: bool) -> None:
        """In front of a commit.

        Args:
            held: of the commit before.
            is_step: not changes between two loops, such as weights that an epoch ends with.
        """
        if is_step:
            self.update_begins(held)  # if there was none, the whole step is outside of updates
        self.is_open = False
        behind, versions = self._behind, self._behind_versions
        if behind is not None and versions is not None:
            hidden = behind.differing(versions.tensors) - versions.moved()
            if hidden and not self._has_unseen:
                self._has_unseen = True
                log.info("changed behind updates without being counted: %s", _listed(hidden))
        self.baseline = self._behind = self._behind_versions = None

    def _hidden(self, held: CommittedTensors) -> set[str]:
        """What has other content than at the commit, and was not counted."""
        assert self.baseline is not None
        tensors = held.versions.tensors
        found = self.baseline.differing(tensors)
        if self._audit.is_first:
            found |= {n for n, copy in held.copies.items() if not is_same(copy, tensors[n])}
        found -= held.versions.moved()
        self._uncounted |= found
        return found

    def _say_refused(self) -> None:
        refused = self._copies.refused
        new = refused.keys() - self._said
        self._said |= new
        if hidden := new & self._uncounted:
            log.warning(
                "nothing of this training can be saved any more: %s changes outside of updates, "
                "torch does not count how, and %s",
                _listed(hidden),
                refused[min(hidden)],
            )
        elif new:
            log.warning(
                "a death in the part of a step in which %s changes loses that step: %s",
                _listed(new),
                refused[min(new)],
            )

    # --- for the listener, while the gate is closed -----------------------------------------------

    def changed(self, held: CommittedTensors) -> set[str]:
        """The names of what is not as of the commit any more and was not copied there."""
        if self._blind_why:
            return set()  # see :meth:`why_unknown`
        versions = held.versions
        now = {name: each for part in self._parts() for name, each in part.items()}
        then = versions.tensors
        found = versions.moved() | {
            name
            for name in versions.replaced(now) & then.keys()  # what is new was not committed
            if name not in now or not is_same(then[name], now[name])
        }
        baseline = self.baseline
        if baseline is not None and self.is_open:
            seen = {name for name, each in then.items() if self._may_see(each)}
            found |= baseline.differing(then, seen)
        # what has no place any more is not saved from a copy, either
        return found - (held.copies.keys() & now.keys())

    def why_unknown(self, held: CommittedTensors) -> str:
        """Why live memory cannot be taken for the state of the commit; empty: it can."""
        if self._blind_why:
            return self._blind_why
        if self._audit.is_first and not self._is_seen(held):
            return UNSEEN
        if hidden := self._uncounted - held.copies.keys():
            return f"torch does not count how {_listed(hidden)} changes outside of updates"
        return ""

    def _is_seen(self, held: CommittedTensors) -> bool:
        """Whether all of the content of what has no copy is compared with that of the commit.

        The main thread has done so where an update has begun, and says what it found; before that,
        :meth:`changed` does.
        """
        tensors, baseline = held.versions.tensors, self.baseline
        left = tensors.keys() - held.copies.keys()
        if not left:
            return True
        is_seen = baseline is not None and baseline.has_all_of(left)
        return is_seen and not (self.is_open and any(not self._may_see(tensors[n]) for n in left))

    def _may_see(self, tensor: Tensor) -> bool:
        return self.is_idle or devices.is_on_host(tensor)


def _listed(names: Iterable[str]) -> str:
    named = sorted(names)
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more
