"""Figures of very many ranks: what is handed to the courier, with a courier."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.histories.plain import rules

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.notify.notifier import Notifier
from agent.spec.job_spec import NotifySpec
from agent.workers.tempo import Tempo
from agent.workers.worker import Worker


@pytest.mark.parametrize(("count", "are_all"), [(3000, True), (30_000, False)])
def test_the_figures_of_many_ranks_are_kept(tmp_path, count, are_all):
    spec = SimpleNamespace(
        notify=NotifySpec(metrics_file=tmp_path / "m.prom"), run_id="a-run", record_id="a"
    )
    facts, said = SimpleNamespace(spec=spec, started=7.5, host="node"), []
    workers = [Worker(rank, rank, 0) for rank in range(count)]
    for worker in workers:
        worker.tempo = Tempo(9, 41, 0.123456789, 0.5, 0.1, 0.2)
    notifier = Notifier(facts, said.append)
    notifier.changed(Job(rules()), workers, Account())
    notifier.close()
    found = (tmp_path / "m.prom").read_text()
    assert 'msrun_ranks{run_id="a-run",state="pending"}' in found
    assert found.count("step_duration_seconds{") == (count if are_all else 0)
    left_out = "the times of steps of 30000 ranks are too many for the metrics: they are left out"
    assert said == ([] if are_all else [left_out])
