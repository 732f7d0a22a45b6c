"""What a job has used up of its budgets outlives the node that decides."""

from types import SimpleNamespace

from support.histories.dumps import done, froze, reg, wrote
from support.histories.plain import gone, launch, up
from support.stand_ins import quiet_parts

from agent.arrivals.living_side import LivingSide
from agent.controller import actions as do
from agent.nodes.run_messages import BudgetKnown, Order
from agent.spec.job_spec import JobSpec, Program, ProgramKind, ReplaceSpec
from agent.spec.spent_budget import SpentBudget
from agent.supervisor.job_controller import JobController
from agent.workers.worker import Worker

NOTHING = SpentBudget()
REPLACE = do.ReplaceRanks(1, (2, 3, 4, 5), (0, 1), "/proc/1/fd/5", 7, "a death")
SPEC = JobSpec(
    program=Program("t.py", (), ProgramKind.SCRIPT, "python"),
    nproc=1,
    run_id="job",
    record_id="rec",
    nodes=(1, 1),
    max_restarts=2,
    replace=ReplaceSpec(is_on=True, max_replacements=2, period_s=50.0),
)


class Loop:
    """Time that stands still until the test puts it forward."""

    def __init__(self):
        self.now_s, self.timers = 1000.0, []

    def time(self):
        return self.now_s

    def call_at(self, when_s, call, *about):
        handle = SimpleNamespace(when_s=when_s, run=lambda: call(*about), cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        handle.when = lambda: when_s
        self.timers.append(handle)
        return handle

    def call_later(self, after_s, call, *about):
        return self.call_at(self.now_s + after_s, call, *about)

    def call_soon(self, call, *about):
        return self.call_at(self.now_s, call, *about)

    def run_to(self, now_s):
        self.now_s = now_s
        for timer in sorted(self.timers, key=lambda one: one.when_s):
            if timer.when_s <= now_s and not timer.cancelled:
                timer.cancel()
                timer.run()


class Nodes:
    """All nodes as one, which note what was known to be used up as an order came."""

    is_swept = True

    def act(self, action):
        if isinstance(action, do.ReplaceRanks | do.StartAttempt):
            self.known.append((type(action).__name__, self.controller.spent))

    def worker(self, rank):
        return Worker(rank, 0, 0)

    def workers(self):
        return ()

    def decided(self, *_):
        pass

    def catch_up(self):
        pass

    def finish(self):
        pass

    def refresh(self):
        return False


def controlled(spent=NOTHING):
    nodes, loop = Nodes(), Loop()
    controller = JobController(SPEC._replace(spent=spent), **quiet_parts())
    nodes.controller, nodes.known = controller, []
    controller.attach(loop, nodes)
    return SimpleNamespace(controller=controller, loop=loop, known=nodes.known)


def begin(job):
    for event in (launch(), up(0), up(1), reg(0, 5), reg(1, 5)):
        job.controller.post(event)


def lose(job, step=5, attempt=0):
    """Rank 1 dies and, if the budget allows that, comes back at the same step."""
    events = (gone(1, -9, attempt=attempt), froze(0, step, dump=attempt + 1))
    for event in (*events, wrote(0, dump=attempt + 1), done("/proc/1/fd/5", dump=attempt + 1)):
        job.controller.post(event)


def test_a_replacement_is_known_before_it_is_ordered():
    """The order may be the last word of the node that decides."""
    job = controlled()
    begin(job)
    job.loop.run_to(1010.0)
    lose(job)
    assert job.known[-1] == ("ReplaceRanks", SpentBudget(0, 1, (1010.0,)))


def test_a_restart_is_known_before_it_is_ordered():
    job = controlled()
    for event in (launch(), up(0), up(1), gone(1, 1), gone(0, -15)):
        job.controller.post(event)
    assert job.known[-1] == ("StartAttempt", SpentBudget(restarts=1))


def test_who_decides_next_goes_on_with_what_is_left():
    spent = SpentBudget(1, 8, (960.0, 990.0))
    job = controlled(spent)
    assert job.controller.spent == spent
    begin(job)
    lose(job)
    assert [kind for kind, _ in job.known] == ["StartAttempt"]  # none is replaced
    assert "all 2 replacements within 50 s are spent" in job.controller._job.now.not_replaced


def test_replacements_of_before_count_no_longer_than_the_period():
    job = controlled(SpentBudget(1, 8, (960.0, 990.0)))
    begin(job)
    job.loop.run_to(1009.0)
    assert job.controller.spent.replaced_at_s == (960.0, 990.0)
    job.loop.run_to(1010.0)
    assert job.controller.spent == SpentBudget(1, 8, (990.0,))
    lose(job)
    assert job.known[-1] == ("ReplaceRanks", SpentBudget(1, 9, (990.0, 1010.0)))


def test_restarts_of_before_count():
    job = controlled(SpentBudget(restarts=2))
    for event in (launch(), up(0), up(1), gone(1, 1), gone(0, -15)):
        job.controller.post(event)
    assert job.controller.ending.exit_code == 1
    assert "all 2 restarts are spent" in job.controller.ending.reason


# --- on several nodes -----------------------------------------------------------------------------


def test_nodes_know_before_they_obey(waiting):
    waiting.controller.spent = SpentBudget(0, 3, (waiting.loop.time(),))
    waiting.all.act(REPLACE)
    for link in waiting.links:
        kinds = [type(each) for each in link.said]
        assert kinds.count(BudgetKnown) == 1
        assert kinds.index(BudgetKnown) < kinds.index(Order)
    waiting.all.act(REPLACE)
    assert sum(isinstance(each, BudgetKnown) for each in waiting.links[0].said) == 1


def test_a_restart_tells_it_too_and_so_does_the_first_attempt_of_who_decides_next(cluster):
    cluster.controller.spent = SpentBudget(1)
    cluster.all.act(do.StartAttempt(3, "again"))
    assert isinstance(cluster.links[1].said[0], BudgetKnown)


def test_a_node_remembers_the_most_that_it_was_told(node):
    told = SpentBudget(1, 3, (8.0,)).told(10.0)
    node.link.hear(BudgetKnown(told))
    assert node.spent == [told]


def test_what_a_node_knows_is_what_it_tells_whoever_decides_next():
    first = SpentBudget(1, 3, ())
    spec = SimpleNamespace(spent=first)
    met = SimpleNamespace(
        prepared=SimpleNamespace(spec=spec),
        asked=SimpleNamespace(master_addr="node0", master_port=29500),
    )
    side = LivingSide(met, {}, print)
    for told, known in ((SpentBudget(0, 2), first), (SpentBudget(1, 4), SpentBudget(1, 4))):
        side.hear(told.told(5.0))
        assert side.spent == known
