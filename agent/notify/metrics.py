"""The figures of a job, as Prometheus orders them: families of samples with labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.states import JobState, RankState
from agent.spec.run_facts import RunFacts
from agent.workers.worker import Worker

Samples = list[tuple[Mapping[str, str], float | None]]


class Family(NamedTuple):
    """One figure, for each of its labels; its kind is Prometheus' type."""

    name: str  # without "msrun_"; a counter's without "_total"
    kind: str
    sentence: str
    samples: Samples


def families(
    facts: RunFacts,
    job: Job,
    workers: Sequence[Worker],
    account: Account,
    hung: int,
    now: float,
    *,
    by_rank: bool = True,
) -> list[Family]:
    """All of them, with the run's name as a label; what is not known has no sample.

    Args:
        hung: ranks that have hung since the job began.
        now: seconds since the epoch.
        by_rank: with those that each rank has.
    """
    run = {"run_id": facts.spec.run_id}
    steps = [worker.beat.step for worker in workers if worker.beat is not None]
    timed = [(worker.rank, worker.tempo) for worker in workers if worker.tempo is not None]
    states = [worker.state for worker in workers]

    def one(name: str, kind: str, sentence: str, value: float | None) -> Family:
        return Family(name, kind, sentence, [(run, value)])

    found = (
        one("step", "gauge", "Newest step that is complete.", max(steps, default=None)),
        Family(
            *("step_duration_seconds", "gauge", "Median time of a rank's recent steps."),
            [({**run, "rank": str(rank)}, tempo.median_s) for rank, tempo in timed if by_rank],
        ),
        Family(
            *("job_state", "gauge", "1 for the state that the job is in."),
            [({**run, "state": each.value}, int(each is job.state)) for each in JobState],
        ),
        Family(
            *("ranks", "gauge", "Ranks by their state."),
            [({**run, "state": each.value}, states.count(each)) for each in RankState],
        ),
        one("replacements", "counter", "Ranks that were replaced alone.", job.replaced_in_all),
        one("restarts", "counter", "Restarts of all ranks.", job.restarts),
        one("hung_ranks", "counter", "Ranks that hung.", hung),
        one("incidents", "counter", "Failures of any kind.", account.incidents),
        one(
            *("lost_seconds", "counter", "Time that training stood still after failures."),
            account.lost_s,
        ),
        one("lost_steps", "counter", "Steps that were trained again.", account.lost_steps),
        # no counter: a hang is noticed late, and then takes back what it was thought to be
        one("training_seconds", "gauge", "Time that was training.", account.training_s),
        one("goodput_ratio", "gauge", "Share of the time that was training.", account.goodput),
        one("start_time_seconds", "gauge", "When the run began, since the epoch.", facts.started),
        one("last_update_time_seconds", "gauge", "When these figures were written.", now),
    )
    known = (
        each._replace(samples=[sample for sample in each.samples if sample[1] is not None])
        for each in found
    )
    return [each for each in known if each.samples]
