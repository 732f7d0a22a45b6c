"""One msrun in the simulated network: it decides by the real rules, and nothing of it is real but these.

Whom it meets is `Search`, who gets a place and when all begin `Admission` and `Gathering`, what a
loss means on node 0 `LostPlaces`, whether ranks train on `may_train_on`. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agent.arrivals.successors import LONGEST_S, PATIENCE_S
from agent.launch.search import LEAD, AloneError, Search
from agent.nodes.line import LIMIT_S, Loss, LossKind
from agent.nodes.messages import ANY_RANK, Join, LivingRanks, SurvivedStep
from agent.nodes.roster import (
    Admission,
    Doors,
    Gathering,
    NodeZeroBackError,
    OwnNode,
    WantedNodes,
    key_of,
)
from agent.seat.records import NodeShare
from support.node_simulator.network import Line
from support.node_simulator.node_words import (
    CHALLENGE_S,
    LAST_CALL_S,
    LOOK_S,
    SAVE_S,
    SEEK_S,
    START_S,
    join_of,
)
from support.node_simulator.stops import Stops

if TYPE_CHECKING:
    from support.node_simulator.simulation import Simulation, World


class Msrun:
    """A process; ``what`` it does at present."""

    def __init__(self, sim: Simulation, machine: int, *, is_spare: bool = False) -> None:
        self.sim = sim
        self.machine = machine
        self.number = len(sim.all)
        self.is_alive = True
        self.what = "begins"
        self.why = ""  # it ended
        self.world: World | None = None
        self.place = ANY_RANK
        self.attempt = 0  # the newest that it knows of
        self.haunted_s = 0.0  # until then who had its place may live
        self.term = ""  # that it knows to count
        self.held: Any = None  # the seat
        self.line: Line | None = None  # to the node that controls, gathers or is dialled
        self.spares: dict[Msrun, Line] = {}  # of a controller
        self._is_spare = is_spare
        self._survived: SurvivedStep | None = None
        self._search: Search | None = None
        self._known: list[Msrun] = []  # the nodes of the job that it has lost
        self._unheard: dict[int, float] = {}  # of these, since when
        self._until_s = 0.0
        self.unsettled: Loss | None = None  # of the controller before this one
        self._turn = 0  # of what it does: a timer for something before it is over
        self._gathering: Gathering | None = None
        self._admission: Admission | None = None
        self._seats: dict[Any, tuple[Msrun, Line]] = {}
        self.stops = Stops(sim, self)
        sim.all.append(self)

    # --- the outside ----------------------------------------------------------------------------

    @property
    def can_be_dialled(self) -> bool:
        return self.is_alive

    def end(self, why: str) -> None:
        """The process ends; its kernel tells everybody."""
        if self.is_alive:
            self.is_alive, self.why = False, why
            self.sim.network.ended(self)

    @property
    def door(self) -> int:
        """Its place as nodes meet again, for which the one that was lost has node 0's."""
        assert self.world is not None
        head = self.world.head
        return {0: head, head: 0}.get(self.place, self.place)

    def become(self, what: str) -> None:
        self.what = what
        self._turn += 1

    def after(self, delay_s: float, happens: Any, *about: Any) -> None:
        """Unless it does something else by then."""
        self.sim.clock.after(delay_s, self._in_turn, self._turn, happens, about)

    def _in_turn(self, turn: int, happens: Any, about: tuple[Any, ...]) -> None:
        if self.stops.defers(self._in_turn, turn, happens, about):
            return
        if self.is_alive and turn == self._turn:
            happens(*about)

    @property
    def answers(self) -> bool:
        """Whether it lets nodes in that come."""
        return self.is_alive and not self.stops.is_stopped and self.what in {"gathers", "controls"}

    # --- in a job -------------------------------------------------------------------------------

    def begin(
        self, world: World, place: int, line: Line | None, unsettled: Loss | None = None
    ) -> None:
        """It has a place in a job; without a line it is the one that controls it.

        ``unsettled``: the one that did is lost so, and its ranks are not replaced yet.
        """
        if world.is_over or (unsettled is not None and self.what != "follows"):
            return
        self.unsettled = unsettled or self.unsettled
        self.world, self.place, self.line = world, place, line
        if not world.attempt:
            self.haunted_s = 0.0
        self.term = ""
        self.become("controls" if line is None else "takes part")
        world.begun.add(place)
        self.attempt = world.attempt

    def know(self, attempt: int) -> None:
        """Another node has the place of a lost one."""
        self.attempt = max(self.attempt, attempt)
        self.unsettled = None

    def know_term(self, world: World, term: str, number: int) -> None:
        """Which term of the store counts."""
        if self.world is world and self.what == "takes part" and self.line is not None:
            self.term = term
            self.line.send(self, world.knows, self, number)

    def lost(self, line: Line, loss: Loss) -> None:  # noqa: C901  a row for each thing it may do
        """A line of it is lost."""
        if self.what == "controls":
            other = line.other(self)
            if self.spares.get(other) is line:  # else it waits on another one by now
                del self.spares[other]
            elif self.world is not None and self.world.lines.get(other) is line:
                self.world.lost(other, loss)
        elif self.what == "gathers":
            self._drop(line)
        elif self.what == "leads":
            self._seats = {each: its for each, its in self._seats.items() if its[1] is not line}
        elif line is not self.line:
            return
        elif self.what == "follows":
            self._save_after_all()
        elif self.what == "takes part":
            self._forsaken(loss)
        elif self.what == "waits":
            self._meet(self.sim.world_of(line).doors(), loss, is_spare=True)
        elif self.what == "has joined" and self._search is None:
            self.come(self._known)
        elif self.what == "has joined":
            self._search.unanswered(self._dialled, self.sim.clock.now)
            self._look_again()
        elif self.what == "asks":
            self._ask_again()

    def over(self) -> None:
        """The controller says that the job is."""
        self.end("the job is over")

    def _forsaken(self, loss: Loss) -> None:
        assert self.world is not None
        if self.world.by_hand and self.sim.may_train_on(loss, self.world):
            self.become("trains alone")
            self._others = self.sim.rules.lost_workers()
            self._know(self.world.nodes())
            self._ask_again()
            self._watch_others()
            return
        self.loss, unsettled, self.unsettled = self.unsettled or loss, self.unsettled, None
        if unsettled is not None:  # what has befallen the one before counts
            self.world.head = self.world.head_before
        if unsettled is None and self.sim.may_await(self, loss):
            self._known = self.world.nodes()
            self._unheard = dict.fromkeys(range(len(self._known)), self.sim.clock.now)
            self._until_s = self.sim.clock.now + LONGEST_S
            others = range(len(self._known))
            self._successors = self.sim.rules.successors(self.place, self.world.head, others)
            self.become("seeks")
            self._seek()
        else:
            self.save(self.loss)

    # --- another node in the part of node 0, while ranks live on -----------------------------------

    def _seek(self) -> None:
        node = self._successors.look(self._doors(self._successors.doors))
        if self.sim.clock.now > self._until_s:
            self.save(self.loss)
        elif node == self.place:
            self._lead()
        elif node is not None and self._known[node].what == "leads":
            self.become("follows")
            self.after(max(0.0, self._until_s - self.sim.clock.now), self._save_after_all)
            target, join = self._known[node], self._join(living=self._living())
            self.line = Line(self.sim.network, self, target)
            self.line.send(self, target.joined, join, self.line)
        else:
            self.after(SEEK_S, self._seek)

    def _save_after_all(self) -> None:
        if self.line is not None:
            self.line.close(self)
            self.line = None
        self.save(self.loss)

    def _living(self, **more: int) -> LivingRanks:
        assert self.world is not None
        world = self.world
        living = LivingRanks(world.job, self.place, self.attempt, "", "", 0, (), "train.py", 0, 0)
        return living._replace(**{"world": len(world.members), **more})

    def _lead(self) -> None:
        assert self.world is not None
        self.become("leads")
        own = self._join(living=self._living())._replace(node_rank=self.place)
        self._come, self._seats = {self: own}, {}
        self._takeover = self.sim.rules.takeover(
            self._living(), self.world.head, range(len(self._known))
        )
        self._until_s -= LONGEST_S - PATIENCE_S
        self._lead_on()

    def _lead_on(self) -> None:
        assert self.world is not None
        here = [join for guest, join in self._come.items() if guest is self or guest in self._seats]
        doors = self._doors(self._takeover.awaited(here))
        if self._takeover.may_begin(here, doors) and not self.world.holds:
            self._take_over(self.world)
        elif self._takeover.is_in_vain(here, doors) or self.sim.clock.now > self._until_s:
            for _, line in self._seats.values():
                line.close(self)
            self.save(self.loss)
        else:
            self.after(SEEK_S, self._lead_on)

    def _take_over(self, world: World) -> None:
        self.sim.note(f"{world.job} is led by {self.number}")
        world.control(self)
        world.head_before, world.head = world.head, self.place
        lost = world.head_before
        self.unsettled, self.line = self.loss, None
        world.lines, world.begun = {}, set()
        self.begin(world, self.place, None)
        for guest, (_, line) in self._seats.items():
            world.lines[guest] = line
            line.send(self, guest.begin, world, guest.place, line, self.loss)
        for place in set(range(len(world.members))) - {lost, self.place}:
            if world.members[place] not in self._seats:
                world._lose(place, world.members[place], self.loss, self)
        world._lose(lost, world.members[lost], self.loss, self)
        self._watch_home(world, lost)

    def _watch_home(self, world: World, lost: int) -> None:
        """Whoever starts node 0 again has the nodes meet there."""
        if world.is_over or self.what != "controls" or world.controller is not self:
            return
        if lost in world.places.vacant and lost in self._doors({lost}).open:
            self.sim.note(f"{self.number} resigns: node 0 is back")
            for line in (*world.lines.values(), *self.spares.values()):
                line.close(self)
            self.spares = {}
            world.head, self.unsettled = lost, None
            self.save(self.loss)
            return
        self.after(LOOK_S, self._watch_home, world, lost)

    def look_for_others(self, nodes: list[Msrun]) -> None:
        """They may go on without this one, which controlled them."""
        self._meet(nodes, Loss(LossKind.PROOF, "it is outvoted"), is_spare=True)

    def save(self, loss: Loss) -> None:
        """The ranks hold, save their step, and end."""
        assert self.world is not None
        world, step = self.world, self.world.step
        world.holds |= self in world.members
        self.become("saves")
        self.after(SAVE_S * self.sim.rng.random(), self._saved, world, step, loss)

    def _saved(self, world: World, step: int, loss: Loss) -> None:
        self.sim.promises.saved(world, step)
        survived = SurvivedStep(
            world.job, self.door, f"/{world.job}/{step}", step, tuple(world.lineage), "train.py"
        )
        is_haunted = self.haunted_s > self.sim.clock.now
        self._survived = survived._replace(
            nodes=len(world.members), attempt=self.attempt, is_haunted=is_haunted
        )
        if why := self.sim.why_over(world, self.door, loss, step):
            self.end(why)
        else:
            self._meet(world.doors(), loss, is_spare=False)

    # --- without node 0 -------------------------------------------------------------------------

    def _meet(self, known: list[Msrun], loss: Loss, *, is_spare: bool) -> None:
        self._is_spare = is_spare
        is_silent, is_mute = loss.kind is not LossKind.PROOF, loss.kind is LossKind.MUTE
        is_silent, now = is_silent and not is_spare, self.sim.clock.now
        self._know(known)
        self._unheard[0] -= LIMIT_S * (is_silent and not is_mute)
        place = len(known) if is_spare else self.door
        others = [rank for rank, each in enumerate(known) if each is not self or rank == place]
        kinds = {"is_spare": is_spare, "is_silent": is_silent, "is_mute": is_mute}
        self._search = self.sim.search(place, others, now, **kinds)
        self._until_s = now + self.sim.wait_s
        needs_store = is_silent and NodeShare.of(len(known) - 1, len(known)) is NodeShare.HALF
        term = "" if is_spare else self.term
        self._right = self.sim.rules.successor(term, needs_store=needs_store)
        self._look_again()

    def _know(self, nodes: list[Msrun]) -> None:
        self._known = nodes
        self._unheard = dict.fromkeys(range(len(nodes)), self.sim.clock.now)

    def _look_again(self) -> None:
        if self.line is not None:
            self.line.close(self)
            self.line = None
        self.become("looks")
        self.after(LOOK_S, self._look)

    def _doors(self, ranks: Iterable[int]) -> Doors:
        gone, silent, there, now = set(), set(), set(), self.sim.clock.now
        for rank in ranks:
            if not 0 <= rank < len(self._known):
                continue
            process = self.sim.at_door(self._known, rank)
            if not self.sim.network.reach(self, process):
                if now - self._unheard[rank] > LIMIT_S:
                    silent.add(rank)
                continue
            self._unheard[rank] = now
            (there if process.can_be_dialled else gone).add(rank)
        return Doors(frozenset(gone), frozenset(silent), frozenset(there))

    def _look(self) -> None:
        assert self._search is not None
        if self.sim.clock.now > self._until_s:
            self.end("no node has taken the part of node 0")
            return
        try:
            node = self._search.look(self._doors(self._search.candidates()), self.sim.clock.now)
        except AloneError as error:
            self.end(str(error))
            return
        if node == LEAD:
            own = self._own(survived=self._survived)
            assert self._survived is not None
            self.gather(own, self._survived.job)
        elif node is None:
            self._look_again()
        else:
            self._dialled = node
            self.become("dials")
            self._dial(self.sim.at_door(self._known, node), self.sim.clock.now + CHALLENGE_S)

    def _dial(self, target: Msrun, until_s: float) -> None:
        """Who listens and does not answer yet may do so while its kernel keeps the connection."""
        assert self._search is not None
        is_there, now = target.is_alive and self.sim.network.reach(self, target), self.sim.clock.now
        if not is_there or now > until_s:
            self._search.unanswered(self._dialled, now)
            self._look_again()
        elif not target.answers:
            self.after(LOOK_S, self._dial, target, until_s)
        else:
            self.become("has joined")
            self.line = Line(self.sim.network, self, target)
            self.line.send(self, target.joined, self._join(), self.line)

    def _join(self, **more: Any) -> Join:
        return join_of(self._own(survived=self._survived, **more))

    def _own(self, **more: Any) -> OwnNode:
        own = OwnNode(ANY_RANK, 1, f"mn{self.machine}", 1 + self.number, "", f"r{self.number}", "1")
        return own._replace(is_spare=self._is_spare, program="train.py", door=1, **more)

    def refused(self, why: str, *, again: bool) -> None:
        """By who was dialled."""
        if self.what == "asks":
            self.line = None
            if again:
                self._end_alone()
            else:
                self.become("trains alone")
                self.after(10.0, self._ask)
        elif self._search is not None and self._search.refused(self._dialled, self.sim.clock.now):
            self._look_again()
        else:
            self.end(why)

    def spared(self) -> None:
        """A job runs, and has no place for it yet."""
        self.become("waits")

    def come(self, nodes: list[Msrun], until_s: float = 0.0) -> None:
        """It was in no job yet: dial node 0 until that answers."""
        self._known, self.line = nodes, None
        self._until_s = until_s or self._until_s
        target = self.sim.at_door(nodes, 0)
        if self.sim.clock.now > self._until_s:
            self.end("the job did not begin")
        elif target.answers and self.sim.network.reach(self, target):
            self.become("has joined")
            self.line = Line(self.sim.network, self, target)
            self.line.send(self, target.joined, self._join(), self.line)
        else:
            self.become("dials")
            self.after(LOOK_S, self.come, nodes)

    # --- ranks that train without a scheduler ---------------------------------------------------

    def _ask_again(self) -> None:
        if self.line is not None:
            self.line.close(self)
            self.line = None
        self.become("trains alone")
        self.after(LOOK_S, self._ask)

    def _ask(self) -> None:
        assert self.world is not None
        target = self.sim.at_door(self.world.nodes(), 0)
        if not (target.answers and self.sim.network.reach(self, target)):
            self._ask_again()
            return
        world = self.world
        living = self._living(attempt=world.attempt, world=len(world.members) - 1)
        self.become("asks")
        self.line, join = Line(self.sim.network, self, target), self._join(living=living)
        self.line.send(self, target.joined, join, self.line)

    def _watch_others(self) -> None:
        """As the watch for a scheduler does: the doors of the others, and the notes of their ranks."""
        world = self.world
        if not self.is_alive or world is None or self.what not in {"trains alone", "asks"}:
            return
        doors = self._doors({*range(1, len(world.members))} - {self.place})
        if world.holds or self._others.why(doors, self.sim.clock.now):
            self._end_alone()
        else:
            self.sim.clock.after(LOOK_S, self._watch_others)

    def _end_alone(self) -> None:
        if self.line is not None:
            self.line.close(self)
            self.line = None
        self.save(Loss(LossKind.PROOF, "the scheduler has ended"))

    # --- who comes here -------------------------------------------------------------------------

    def gather(self, own: OwnNode, job: str = "") -> None:
        """Wait for the other nodes; ``job``: that has lost its node 0, else this is node 0."""
        self.become("gathers")
        nodes, by_hand = self.sim.nodes, self.sim.by_hand
        wanted = WantedNodes(
            nodes, nodes - 1 if by_hand else None, least=self.sim.least, last_call_s=LAST_CALL_S
        )
        self._enough_since_s: float | None = None
        self._seats = {}
        self._gathering = self.sim.gathering(own._replace(nproc=0) if by_hand else own, wanted)
        if by_hand and job:  # who takes the scheduler's part has a rank, too
            self._gathering = self.sim.gathering(own, WantedNodes(nodes - 1, nodes - 1))
        self._survivors = survivors = None
        if job:
            self._survivors = survivors = self.sim.survivors(len(self._known), job, self._right)
        self._admission = Admission(self._gathering, survivors)
        if not job:
            self._until_s = self.sim.clock.now + START_S
        self._knock(bool(job))

    def _knock(self, is_succession: bool) -> None:
        assert self._admission is not None
        if self.sim.clock.now > self._until_s:
            self._turn_away(why := "not all nodes came")
            self.end(why)
            return
        if is_succession:
            assert self._search is not None
            try:
                awaited = self._admission.awaited()
                here, doors = {*range(len(self._known))} - awaited, self._doors({0, *awaited})
                may_begin = self._survivors is not None and self._survivors.may_begin(here, doors)
                kinds = {"is_seated": self._right.held is not None, "are_enough": may_begin}
                self._admission.doors = self._search.gather(doors, self.sim.clock.now, **kinds)
                self._claim(here)
            except NodeZeroBackError:
                for _, line in self._seats.values():
                    line.close(self)
                self._look_again()
                return
            except AloneError as error:
                self._turn_away(str(error))
                self.end(str(error))
                return
        now = self.sim.clock.now
        enough_s = self._enough_since_s if self._admission.is_enough else None
        if self._admission.is_enough and enough_s is None:
            enough_s = now
        self._enough_since_s = enough_s
        is_over = enough_s is not None and now >= enough_s + LAST_CALL_S
        if self._admission.is_complete or is_over:
            self._begin_all()
        else:
            self.after(LOOK_S, self._knock, is_succession)

    def _claim(self, here: set[int]) -> None:
        """Ask the store, as `Claim` does."""
        assert self._survivors is not None
        assert self._admission is not None
        standing = self._survivors.standing(here, self._admission.doors)
        wish = self._right.wish(standing, self.sim.clock.now)
        if wish is not None and self.sim.store is not None:
            self.sim.store.ask(self, wish, self._heard)

    def _heard(self, _asker: Msrun, happened: str, *about: Any) -> None:
        if happened == "took":
            self.sim.note(f"{self.number} has the seat: {about[0].term}")
        known = () if happened in {"failed", "renewed"} else about
        getattr(self._right, happened)(*known, self.sim.clock.now)

    def _turn_away(self, why: str) -> None:
        for guest, line in self._seats.values():
            line.send(self, guest.end, why)

    def joined(self, join: Join, line: Line) -> None:
        """A node has come, or what it said arrives late."""
        guest = line.other(self)
        if self.what == "controls":
            self.world.judge(join, guest, line)
            return
        if self.what == "leads" and join.living is not None:
            join = join._replace(node_rank=join.living.node_rank)
            self._come[guest], self._seats[guest] = join, (guest, line)
            return
        if self.what != "gathers":
            line.close(self)
            return
        assert self._admission is not None
        assert self._gathering is not None
        if not self._admission.is_wanted(join):
            line.close(self)
            return
        address = f"10.0.0.{guest.number}"
        if why := self._gathering.add(join, address):
            self.refuse(guest, line, why)
            return
        key = key_of(join, address)
        if earlier := self._seats.pop(key, None):
            earlier[1].close(self)
        self._seats[key] = guest, line
        if self._gathering.is_mixed:
            for other in [k for k, (each, _) in self._seats.items() if each.what == "asks"]:
                living, its = self._seats.pop(other)
                self._gathering.remove(other)
                self.refuse(living, its, "mixed", again=True)

    def refuse(self, guest: Msrun, line: Line, why: str, *, again: bool = False) -> None:
        def hear() -> None:
            if guest.line is line:
                guest.refused(why, again=again)

        line.send(self, hear)

    def _drop(self, line: Line) -> None:
        assert self._gathering is not None
        for key in [key for key, (_, its) in self._seats.items() if its is line]:
            self._gathering.remove(key)
            del self._seats[key]

    def _begin_all(self) -> None:
        assert self._gathering is not None
        past, ranks = self._gathering.past(), self._gathering.node_ranks()
        seats, self._seats = self._seats, {}
        members: list[Msrun] = [self] * (len(seats) + 1)
        for key, (guest, _) in seats.items():
            members[ranks[key]] = guest
        adopted = self.sim.jobs.get(past.job) if isinstance(past, LivingRanks) else None
        if self._survivors is not None:
            self.held = self._right.held
        world = self.sim.begin(self, members, past, adopted)
        self.begin(world, 0, None)
        for key, (guest, line) in seats.items():
            world.lines[guest] = line
            line.send(self, guest.begin, world, ranks[key], line)
