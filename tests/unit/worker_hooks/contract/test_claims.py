"""An attempt of a job whose msrun on node 0 is gone is saved by its ranks, or goes on elsewhere."""

import threading

from worker_hooks.contract.left_pages import ALONE, TAKEN, claim, claimed, unclaim


def test_who_is_first_has_it(tmp_path):
    assert claimed(tmp_path, "job", 3) == ""
    assert claim(tmp_path, "job", 3, ALONE)
    assert not claim(tmp_path, "job", 3, TAKEN)
    assert claim(tmp_path, "job", 3, ALONE)  # each of these ranks asks
    assert claimed(tmp_path, "job", 3) == ALONE


def test_each_attempt_and_job_is_another_one(tmp_path):
    assert claim(tmp_path, "job", 3, ALONE)
    assert claim(tmp_path, "job", 4, TAKEN)
    assert claim(tmp_path, "other", 3, TAKEN)


def test_nothing_of_a_job_is_left(tmp_path):
    claim(tmp_path / "new", "job", 3, TAKEN)
    claim(tmp_path / "new", "job", 4, TAKEN)
    claim(tmp_path / "new", "other", 4, TAKEN)
    unclaim(tmp_path / "new", "job")
    assert [claimed(tmp_path / "new", "job", attempt) for attempt in (3, 4)] == ["", ""]
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_of_many_at_once_one_kind_has_it(tmp_path):
    found = []

    def ask(who):
        found.append((who, claim(tmp_path, "job", 0, who)))

    asking = [threading.Thread(target=ask, args=(who,)) for who in (ALONE, TAKEN) * 8]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    winner = claimed(tmp_path, "job", 0)
    assert {who for who, is_its in found if is_its} == {winner}
    assert {who for who, is_its in found if not is_its} == {ALONE, TAKEN} - {winner}
