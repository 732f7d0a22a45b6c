"""Schedules of cuts, deaths and returns of nodes, and the promises that hold in each.

`simulate(seed)` plays one, and raises `BrokenPromiseError`, which names the seed. Not a test itself.
"""

from __future__ import annotations

from random import Random
from typing import Any

from agent.arrivals.places import SURE_S, LostPlaces, Relation, relation
from agent.arrivals.successors import PATIENCE_S, Successors, Takeover, why_not_awaited
from agent.launch.scheduler_watch import LostWorkers, may_train_on
from agent.launch.search import Search
from agent.launch.succession import why_over
from agent.nodes.line import LIMIT_S, Loss, LossKind
from agent.nodes.messages import Join, LivingRanks
from agent.nodes.roster import Gathering, Survivors
from agent.nodes.run_messages import NodeFacts
from agent.seat.records import NodeShare
from agent.seat.rights import GrantPlaces, NodeZeroRight, SuccessorRight, TellTerm
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind, ReplaceSpec
from agent.supervisor.all_nodes import FENCE_S
from support.node_simulator.msrun import Msrun
from support.node_simulator.network import JITTER_S, Clock, Line, Network
from support.node_simulator.node_words import START_S
from support.node_simulator.stops import LONGEST_S
from support.node_simulator.store import ASKED, STORE, Store

STEP_S = 1.0
STORE_DIES = 0.03  # that it is the store that something happens to
TROUBLE_S = 60.0  # in which things happen
CLOSE = 0.3  # of the faults are followed by others at once
HORIZON_S = 300.0  # after that, until all has settled, on top of what nodes wait
SPEC = JobSpec(Program("train.py", (), ProgramKind.SCRIPT, "python"), 1, "r", "r")


class BrokenPromiseError(AssertionError):
    """A promise does not hold; `simulate(seed)` shows it again."""


class Rules:
    """What is decided by; mutants replace one of it."""

    survivors: Any = Survivors
    node_zero: Any = NodeZeroRight
    successor: Any = SuccessorRight
    store: Any = Store
    places: Any = LostPlaces
    search: Any = Search
    gathering: Any = Gathering
    lost_workers: Any = LostWorkers
    may_train_on: Any = staticmethod(may_train_on)
    successors: Any = Successors
    takeover: Any = Takeover
    why_not_awaited: Any = staticmethod(why_not_awaited)
    relation: Any = staticmethod(relation)


class World:
    """A job from one meeting to its end: ranks that train together, and who controls them."""

    def __init__(
        self, sim: Simulation, controller: Msrun, members: list[Msrun], resumed: int
    ) -> None:
        self.sim = sim
        self.by_hand = sim.by_hand and len(members) == sim.nodes
        self.job = f"job{len(sim.jobs)}"
        self.lineage: list[str] = []
        self.members: list[Msrun | None] = [*members]
        self.began_with = members
        self.first_members = tuple(members)
        self.begun: set[int] = set()
        self.lines: dict[Msrun, Line] = {}
        self.attempt = 0
        self.head = self.head_before = 0  # the place of the controller
        self.step = resumed
        self.changed_at = -1  # the step in which another node got a place
        self.first_s: float | None = None  # its first commit
        self.holds = False  # some rank does
        self.is_over = False
        self.control(controller)
        sim.clock.after(STEP_S, self._train)

    def control(self, controller: Msrun) -> None:
        self.sim.promises.controlled(self)
        self.controller = controller
        self.places = self.sim.rules.places(len(self.members), self.sim.wait_s)
        self.right = None
        if self.sim.store is not None:
            self.right = self.sim.rules.node_zero(controller.held, self.sim.clock.now)
            controller.held = None
            self.sim.clock.after(0.0, self._greet, controller)

    def nodes(self) -> list[Msrun]:
        """Those that have places, or had them last."""
        return [now or then for now, then in zip(self.members, self.began_with, strict=True)]

    def doors(self) -> list[Msrun]:
        """The same in the order in which they meet again."""
        nodes = self.nodes()
        nodes[0], nodes[self.head] = nodes[self.head], nodes[0]
        return nodes

    def shares_past_with(self, other: World) -> bool:
        """Whether one has resumed the other, or both what was before them."""
        return bool({self.job, *self.lineage} & {other.job, *other.lineage})

    def _train(self) -> None:
        if self.is_over:
            return
        if self.trains:
            self.step += 1
            self.first_s = self.sim.clock.now if self.first_s is None else self.first_s
            self.sim.promises.committed(self)
        self.sim.clock.after(STEP_S, self._train)

    @property
    def trains(self) -> bool:
        """All ranks are there, hear each other, and none holds."""
        if self.is_over or self.holds or self.places.vacant or len(self.begun) < len(self.members):
            return False
        there = [each for each in self.members[int(self.by_hand) :] if each is not None]
        if len(there) < len(self.members) - self.by_hand:
            return False
        at_work = {"controls", "takes part", "trains alone", "asks"}
        if not all(each.is_alive and each.what in at_work and each.world is self for each in there):
            return False
        return all(self.sim.network.reach(there[0], each) for each in there)

    @property
    def trains_alone(self) -> bool:
        """All workers train without a scheduler: one that adopted them has heard of none since."""
        alone = {"trains alone", "asks"}
        there = [each for each in self.sim.all if each.world is self and each.what in alone]
        if not self.by_hand or len(there) < len(self.members) - 1:
            return False
        reach = self.sim.network.reach
        return all(each.is_alive and reach(there[0], each) for each in there)

    # --- what the controller does ---------------------------------------------------------------

    def lost(self, node: Msrun, loss: Loss) -> None:
        if node not in self.members:
            return
        # of that place: it may be a spare node by then, and have another one
        about = self.members.index(node), node, loss, self.controller
        wait_s = FENCE_S - loss.over_s if loss.kind is LossKind.SILENCE else 0.0
        self.sim.clock.after(wait_s, self._lose, *about)

    def _lose(self, place: int, node: Msrun, loss: Loss, controller: Msrun) -> None:
        if self.is_over or controller is not self.controller or not controller.is_alive:
            return
        if controller.stops.defers(self._lose, place, node, loss, controller):
            return
        if self.members[place] is not node:
            return
        self.members[place] = None
        now = self.sim.clock.now
        is_silent = loss.kind is LossKind.SILENCE
        was_heard = place in self.begun or node is not self.first_members[place]
        self.places.lose(place, now, is_silent=is_silent, was_heard=was_heard)
        standing = self.places.standing(now)
        if standing is NodeShare.FEW:
            self.end("more than half of the nodes are silent", is_outvoted=True)
            return
        if self.right is not None:
            self.right.lost(node, is_silent=is_silent)
            self.places.is_in_doubt = True
            self._do(self.right.judged(standing, now))
            if self.is_over:
                return
        self.sim.clock.after(self.sim.wait_s, self._give_up, place, node, controller)
        self.fill_places()

    def _give_up(self, place: int, node: Msrun, controller: Msrun) -> None:
        if controller.stops.defers(self._give_up, place, node, controller):
            return
        still = place in self.places.vacant and self.began_with[place] is node
        if still and controller is self.controller:
            self.end("no node came in the place of the lost one")

    def judge(self, join: Join, guest: Msrun, line: Line) -> None:
        """As `AllNodes` does about who comes while the job runs."""
        controller = self.controller
        if join.living is not None:
            controller.refuse(guest, line, "it was left", again=True)
            return
        if join.survived is not None:
            found = self.sim.relation(join.survived, (self.job, *self.lineage), self.step)
            if found is Relation.AHEAD:
                controller.refuse(guest, line, "the job here ends")
                self.end("a later step is saved")
                return
        controller.spares[guest] = line
        line.send(controller, guest.spared)
        self.fill_places()

    def fill_places(self) -> None:
        """Spare nodes get the places of lost ones."""
        facts = [NodeFacts(rank, "", "", 1, 1) for rank in range(len(self.members))]
        for guest, line in tuple(self.controller.spares.items()):
            place = self.places.place(facts, 1, "")
            if place is None:
                break
            del self.controller.spares[guest]
            self.places.settle(place)
            is_same = self.began_with[place] is guest
            now = self.sim.clock.now
            is_haunted = self.places.is_haunted(place, now) and not is_same
            guest.haunted_s = now + self.sim.wait_s + SURE_S if is_haunted else 0.0
            self.members[place] = self.began_with[place] = guest
            self.begun.discard(place)
            self.changed_at = self.step
            self.attempt += 1
            self.controller.know(self.attempt)
            for node, its in self.lines.items():
                its.send(self.controller, node.know, self.attempt)
            self.lines[guest] = line
            line.send(self.controller, guest.begin, self, place, line)
            if self.right is not None:
                self._do(self.right.came(guest))
        self.holds = self.holds and bool(self.places.vacant)

    # --- what it does about the store -----------------------------------------------------------

    def _greet(self, controller: Msrun) -> None:
        if controller is self.controller:
            for node in self.lines:
                self._do(self.right.came(node))
            self._tick(controller)

    def _tick(self, controller: Msrun) -> None:
        if controller.stops.defers(self._tick, controller):
            return
        if controller is self.controller and controller.is_alive and not self.is_over:
            self._do(self.right.passed(self.sim.clock.now))
            self.sim.clock.after(1.0, self._tick, controller)

    def _do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, TellTerm):
                for node in action.nodes:
                    if node in self.lines:
                        about = self, action.term, action.number
                        self.lines[node].send(self.controller, node.know_term, *about)
            elif isinstance(action, ASKED):
                self.sim.store.ask(self.controller, action, self._hear)
            elif isinstance(action, GrantPlaces):
                self.places.is_in_doubt = False
                self.fill_places()
            elif hasattr(action, "why"):
                self.end(action.why, is_outvoted=True)

    def _hear(self, asker: Msrun, happened: str, *about: Any) -> None:
        if asker.stops.defers(self._hear, asker, happened, *about):
            return
        if asker is self.controller and asker.is_alive and not self.is_over:
            if happened == "took":
                self.sim.note(f"{self.job} has the seat: {about[0].term}")
            now = self.sim.clock.now
            if happened == "renewed":
                self._do(self.right.renewed(now, is_held=about[0]))
            else:
                self._do(getattr(self.right, happened)(*about, now))

    def knows(self, node: Msrun, number: int) -> None:
        """A node has heard which term counts."""
        if self.right is not None:
            self.right.knows(node, number)

    def end(self, why: str, *, is_outvoted: bool = False) -> None:
        """The step is saved, and all are told."""
        if self.is_over or not self.controller.is_alive:
            return
        self.sim.promises.saved(self, self.step)
        self.is_over = True
        if self.right is not None and self.right.held is not None:
            self.sim.store.leave(self.controller, self.right.held)
        for node, line in self.lines.items():
            line.send(self.controller, node.over)
        if not is_outvoted or self.by_hand:
            for node, line in self.controller.spares.items():
                line.send(self.controller, node.over)
            self.sim.clock.after(5.0, self.controller.end, why)
            return
        self.controller.become("ends its ranks")
        for line in self.controller.spares.values():
            line.close(self.controller)
        self.controller.spares = {}
        self.controller.after(5.0, self.controller.look_for_others, self.doors())


class Promises:
    """What must hold whatever happens."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._saved: dict[int, World] = {}
        self._terms: dict[str, int] = {}

    def broken(self, promise: str) -> None:
        raise BrokenPromiseError(
            f"simulate({self.sim.seed}) at {self.sim.clock.now:.1f} s: {promise}\n  "
            + "\n  ".join(self.sim.story)
        )

    def controlled(self, world: World) -> None:
        """Never two controllers of the same ranks."""
        before = getattr(world, "controller", None)
        if before is not None and before.is_alive:
            self.broken(f"{world.job} has two controllers")
        if world.is_over:
            self.broken(f"{world.job}, which is over, gets another controller")

    def committed(self, world: World) -> None:
        """Never two worlds that train: what began later has taken the place of what was before."""
        assert world.first_s is not None
        for other in self.sim.jobs.values():
            is_later = other is not world and other.first_s is not None
            if is_later and other.first_s > world.first_s and other.shares_past_with(world):
                self.broken(f"{world.job} trains step {world.step} beside {other.job}")

    def seated(self, process: Msrun, term: str) -> None:
        """Never two who have begun the same term, and each later than the one before."""
        if term in self._terms:
            self.broken(f"{process.number} begins term {term}, as {self._terms[term]} did")
        self._terms[term] = process.number

    def saved(self, world: World, step: int) -> None:
        """Never two checkpoints of one step that are not the same."""
        other = self._saved.setdefault(step, world)
        if other is not world and other.first_s is not None and world.first_s is not None:
            early, late = sorted((world, other), key=lambda each: each.first_s or 0.0)
            if early.job not in late.lineage and late.shares_past_with(early):
                self.broken(f"step {step} is saved by {early.job} and by {late.job}")

    def over(self) -> None:
        """Everything has come to an end, or trains."""
        for each in self.sim.all:
            world = each.world
            if not each.is_alive or self.sim.network.is_off(each.machine):
                continue
            if each.what == "waits":
                assert each.line is not None
                world = each.line.other(each).world
            if each.what in {"controls", "takes part", "trains alone", "asks", "waits"} and (
                world is not None and world.trains
            ):
                continue
            if world is not None and world.trains_alone:
                continue  # training comes to its end by itself
            self.broken(f"process {each.number} {each.what} for ever")


class Simulation:
    """One schedule."""

    def __init__(self, seed: int, rules: Any = Rules) -> None:
        self.seed = seed
        self.rules = rules
        self.rng = rng = Random(seed)
        self.clock = Clock()
        self.network = Network(self.clock, rng)
        self.promises = Promises(self)
        self.all: list[Msrun] = []
        self.jobs: dict[str, World] = {}
        self.story: list[str] = []
        self.nodes = rng.choice((2, 3, 3, 4, 5))
        self.by_hand = self.nodes > 2 and rng.random() < 0.4
        self.wait_s = rng.choice((40.0, 120.0))
        self.least = 0 if self.by_hand else rng.choice((0, 0, 1, 2))  # nodes of a smaller job
        self.store = rules.store(self) if rng.random() < 0.5 else None
        self.search, self.gathering, self.survivors = rules.search, rules.gathering, rules.survivors
        first = [Msrun(self, machine) for machine in range(self.nodes)]
        world = self.begin(first[0], first, None, None)
        first[0].begin(world, 0, None)
        for place, each in enumerate(first[1:], 1):
            world.lines[each] = Line(self.network, first[0], each)
            each.begin(world, place, world.lines[each])
        for machine in range(rng.choice((0, 1, 2, 4))):
            self.spare(self.nodes + machine)

    def spare(self, machine: int) -> None:
        """A node that waits comes to whoever controls the first job."""
        head = self.all[0]
        if head.is_alive and head.what == "controls":
            spare = Msrun(self, machine, is_spare=True)
            spare.line = head.spares[spare] = Line(self.network, head, spare)
            spare.spared()

    def begin(
        self, controller: Msrun, members: list[Msrun], past: Any, adopted: World | None
    ) -> World:
        """All are there."""
        if adopted is not None:
            self.note(f"{adopted.job} is adopted by {controller.number}")
            if any(each.world is not adopted for each in members[1:]):
                self.promises.broken(f"{adopted.job} goes on with ranks that do not train")
            adopted.control(controller)
            adopted.members[0] = adopted.began_with[0] = controller
            adopted.begun, adopted.lines = set(), {}
            return adopted
        is_new = past is None or isinstance(past, LivingRanks)
        world = World(self, controller, members, 0 if is_new else past.step)
        world.lineage = [] if is_new else [past.job, *past.lineage]
        self.jobs[world.job] = world
        numbers = [each.number for each in members]
        self.note(f"{world.job} of {numbers} begins after step {world.step} of {world.lineage[:1]}")
        return world

    def world_of(self, line: Line) -> World:
        """That of the controller at one end."""
        return next(each.world for each in line.ends if each.what == "controls" or each.world)

    def at_door(self, known: list[Msrun], rank: int) -> Msrun:
        """The process at a node's address; node 0's may be started again."""
        if rank == 0:
            here = [each for each in self.all if each.machine == known[0].machine]
            return next((each for each in reversed(here) if each.is_alive), here[-1])
        return known[rank]

    def may_train_on(self, loss: Loss, world: World) -> bool:
        is_calm = not (world.holds or world.places.vacant) and world.step > world.changed_at
        return self.rules.may_train_on(loss, is_calm=is_calm, is_asked=False)

    def may_await(self, node: Msrun, loss: Loss) -> bool:
        """Whether ranks wait for another controller."""
        world = node.world
        assert world is not None
        if world.by_hand or self.store is not None:
            return False
        is_calm = not (world.holds or world.places.vacant or world.is_over)
        is_calm = is_calm and len(world.begun) == len(world.members)
        facts = [NodeFacts(rank, "", "", 1, 1, door=1) for rank in range(len(world.members))]
        where = node.place, world.head
        return not self.rules.why_not_awaited(
            loss, facts, *where, is_calm=is_calm, is_fixed=not self.least
        )

    def relation(self, survived: Any, jobs: Any, newest: int) -> Any:
        return self.rules.relation(survived, jobs, "train.py", newest)

    def why_over(self, world: World, place: int, loss: Loss, step: int) -> str:
        nodes = tuple(NodeFacts(rank, "", "", 1, 1, door=1) for rank in range(len(world.members)))
        spec = SPEC._replace(
            cluster=ClusterSpec(len(nodes)),
            node_rank=place,
            replace=ReplaceSpec(node_wait_s=self.wait_s),
        )
        term = self.at_place(world, place)
        return why_over(spec, nodes, loss, step, term)

    def at_place(self, world: World, place: int) -> str:
        """The term that the node at a place knows to count."""
        return next(
            (each.term for each in self.all if each.world is world and each.place == place), ""
        )

    def note(self, text: str) -> None:
        self.story.append(f"{self.clock.now:6.1f} s: {text}")

    # --- what happens ---------------------------------------------------------------------------

    def trouble(self) -> None:  # noqa: C901, PLR0912  a row for each kind
        """One thing goes wrong, or gets better."""
        rng = self.rng
        machine = rng.randrange(self.nodes) if rng.random() < 0.6 else 0
        there = [each for each in self.all if each.machine == machine and each.is_alive]
        if self.store is not None and rng.random() < STORE_DIES:
            self.note("the store is off")
            self.network.change(off=STORE)
            return
        kinds = "cut", "cut", "mend", "kill", "kill", "off", "again", "again", "stop", "stop"
        match rng.choice(kinds):
            case "cut":
                self.network.change(self._parts())
                if (
                    not self.by_hand and rng.random() < CLOSE
                ):  # as lines are given up: at some ends, and not at others
                    mend_s = LIMIT_S + JITTER_S * rng.random()
                    self.clock.after(mend_s, self.network.change, {})
            case "mend":
                self.note("mended")
                self.network.change({})
            case "kill" if there:
                self.note(f"process {there[-1].number} is killed")
                there[-1].end("killed")
                if (
                    not self.by_hand and rng.random() < CLOSE
                ):  # as the others look for another controller
                    self.clock.after(PATIENCE_S * rng.random(), self.trouble)
            case "stop" if there:
                there[-1].stops.stop(LONGEST_S * rng.random())
            case "off" if there and rng.random() < 0.5:
                self.note(f"machine {machine} is off")
                for each in there:
                    each.is_alive = False
                self.network.change(off=machine)
            case "again" if not [each for each in self.all if each.machine == 0 and each.is_alive]:
                if not self.network.is_off(0):
                    self.note("node 0 is started again")
                    self._start_first(Msrun(self, 0))
            case "again" if (
                self.by_hand and machine and not there and not self.network.is_off(machine)
            ):
                self.note(f"worker {machine} is started again")
                Msrun(self, machine).come(self.all[: self.nodes], self.clock.now + START_S)
            case _:
                pass

    def _start_first(self, new: Msrun) -> None:
        """Node 0 begins, unless the store says that the job is elsewhere."""
        seat = self.store and self.store.holder(new)
        if self.store is not None and not self.network.reach(new, self.store):
            new.end("the store does not answer")
        elif seat is not None and seat.machine != 0 and not self.by_hand:
            new.come([seat], self.clock.now + START_S)
        else:
            new.gather(new._own(node_rank=0))

    def _parts(self) -> dict[int, int]:
        """The network falls apart, often into halves of the job; spare nodes are anywhere."""
        rng, machines = self.rng, [*range(self.nodes)]
        rng.shuffle(machines)
        count = rng.choice((2, 2, 2, 3))
        size = self.nodes // 2 if rng.random() < 0.6 else rng.randrange(1, self.nodes)
        parts = {
            machine: 0 if at < size else rng.randrange(1, count)
            for at, machine in enumerate(machines)
        }
        parts |= {
            each.machine: rng.randrange(count) for each in self.all if each.machine >= self.nodes
        }
        parts[STORE] = rng.randrange(count + 1)  # perhaps with nobody
        self.note(f"cut into {parts}")
        return parts

    def run(self) -> Simulation:
        """To the end."""
        count = self.rng.choice((1, 2, 3, 4, 6))
        close_s = self.rng.choice((2.0, 15.0, TROUBLE_S))
        for _ in range(count):
            self.clock.after(5.0 + close_s * self.rng.random(), self.trouble)
        if self.rng.random() < 0.5:
            self.clock.after(TROUBLE_S * self.rng.random() + 5.0, self.network.change, {})
        self.clock.run(5.0 + TROUBLE_S + 3 * self.wait_s + HORIZON_S)
        self.promises.over()
        return self

    def take_apart(self) -> None:
        self.clock.clear()


def simulate(seed: int, rules: Any = Rules) -> Simulation:
    """Play one schedule.

    Raises:
        BrokenPromiseError: a promise does not hold.
    """
    sim = Simulation(seed, rules)
    try:
        return sim.run()
    finally:
        sim.take_apart()
