"""Whoever asks for a rank's log on any node of a job is answered by the node of the rank."""

from agent.controller import actions as do
from agent.nodes.line import Loss, LossKind
from agent.nodes.run_messages import NOW, LogAsked, LogRead


def test_who_asks_for_a_log_on_one_node_is_answered_by_the_node_of_the_rank(cluster):
    first, second = cluster.links
    first.hear(LogAsked(7, 5, NOW, (0, 0, 0), False))
    (asked,) = second.said
    assert (asked.rank, asked.attempt) == (5, NOW)
    second.hear(LogRead(asked.question, b"of rank 5"))
    assert first.said == [LogRead(7, b"of rank 5")]


def test_who_asks_for_a_log_on_a_node_that_is_lost_hears_so(cluster):
    first, second = cluster.links
    first.hear(LogAsked(7, 5, NOW, (0, 0, 0), True))
    second.lose(Loss(LossKind.PROOF, "closed the line"))
    told = [each for each in first.said if isinstance(each, LogRead)]
    assert told == [LogRead(7, why_not="it is on node 2 (c), which is lost")]


def test_the_end_of_logs_here_is_told_once_the_sweep_is_done(cluster, monkeypatch):
    monkeypatch.setattr(cluster.all.logs, "rest", lambda: cluster.acts.append("rest"))
    sweep = do.Sweep("all are gone")
    cluster.all.act(sweep)
    assert cluster.acts == [sweep, "rest"]
