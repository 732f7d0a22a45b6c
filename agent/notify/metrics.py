"""The figures of a job in Prometheus' text format. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.states import JobState, RankState
from agent.spec.run_facts import RunFacts
from agent.workers.worker import Worker

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Samples = Iterable[tuple[Mapping[str, object], float | None]]


def exposition(
    facts: RunFacts,
    job: Job,
    workers: Sequence[Worker],
    account: Account,
    hung: int,
    now: float,
    *,
    by_rank: bool = True,
) -> str:
    """All of them; what is not known has no sample.

    Args:
        facts: of the run.
        job: its present state.
        workers: its ranks.
        account: what failures cost.
        hung: ranks that have hung since the job began.
        now: seconds since the epoch.
        by_rank: with those that each rank has.
    """
    one: Mapping[str, object] = {}
    steps = [worker.beat.step for worker in workers if worker.beat is not None]
    timed = [(worker.rank, worker.tempo) for worker in workers if worker.tempo is not None]
    states = [worker.state for worker in workers]
    families: list[tuple[str, str, str, Samples]] = [
        ("step", "gauge", "Newest step that is complete.", [(one, max(steps, default=None))]),
        (
            *("step_duration_seconds", "gauge", "Median time of a rank's recent steps."),
            [({"rank": rank}, tempo.median_s) for rank, tempo in timed if by_rank],
        ),
        (
            *("job_state", "gauge", "1 for the state that the job is in."),
            [({"state": each.value}, int(each is job.state)) for each in JobState],
        ),
        (
            *("ranks", "gauge", "Ranks by their state."),
            [({"state": each.value}, states.count(each)) for each in RankState],
        ),
        (
            *("replacements_total", "counter", "Ranks that were replaced alone."),
            [(one, job.replaced_in_all)],
        ),
        ("restarts_total", "counter", "Restarts of all ranks.", [(one, job.restarts)]),
        ("hung_ranks_total", "counter", "Ranks that hung.", [(one, hung)]),
        ("incidents_total", "counter", "Failures of any kind.", [(one, account.incidents)]),
        (
            *("lost_seconds_total", "counter", "Time that training stood still after failures."),
            [(one, account.lost_s)],
        ),
        (
            *("lost_steps_total", "counter", "Steps that were trained again."),
            [(one, account.lost_steps)],
        ),
        (
            # no counter: a hang is noticed late, and then takes back what it was thought to be
            *("training_seconds", "gauge", "Time that was training."),
            [(one, account.training_s)],
        ),
        (
            *("goodput_ratio", "gauge", "Share of the time that was training."),
            [(one, account.goodput)],
        ),
        (
            *("start_time_seconds", "gauge", "When the run began, since the epoch."),
            [(one, facts.started)],
        ),
        (
            *("last_update_time_seconds", "gauge", "When these figures were written."),
            [(one, now)],
        ),
    ]
    run = {"run_id": facts.spec.run_id}
    return "".join(line for family in families for line in _family(run, *family))


def _family(
    run: Mapping[str, object], name: str, kind: str, sentence: str, samples: Samples
) -> Iterator[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        yield f"# HELP msrun_{name} {sentence}\n# TYPE msrun_{name} {kind}\n"
    for labels, value in known:
        pairs = (f'{key}="{_escaped(each)}"' for key, each in {**run, **labels}.items())
        yield f"msrun_{name}{{{','.join(pairs)}}} {value}\n"


def _escaped(value: object) -> str:
    return str(value).translate(_ESCAPED)
