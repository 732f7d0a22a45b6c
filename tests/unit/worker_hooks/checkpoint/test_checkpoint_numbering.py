"""Lives of one training count their checkpoints together; a stranger's are left alone."""

from __future__ import annotations

import pytest
from support.checkpoints import saved

from worker_hooks.checkpoint.numbering import choose_prefix


def there(folder, *names, run="r1"):
    for at, name in enumerate(names):
        saved(folder, name, saved_at=float(at), run=run)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "CKP"),
        (["CKP-1_5"], "CKP_1"),
        (["CKP-1_5_replaced_1"], "CKP_1"),
        (["CKP-1_5_breakpoint"], "CKP_1"),
        (["CKP-1_5", "CKP_1-1_5"], "CKP_2"),
        (["CKP_1-1_5"], "CKP"),
        (["Other-1_5", "CKP-x", "CKP_x-1_5", "CKP_01-1_5"], "CKP"),
        (["tft_saved_checkpoints-step_5"], "CKP"),
    ],
)
def test_who_begins_anew_leaves_others_alone(tmp_path, names, expected):
    there(tmp_path, *names)
    assert choose_prefix(tmp_path, "CKP", "r2", None) == expected
    assert choose_prefix(tmp_path, "CKP", "", None) == expected


def test_who_goes_on_from_one_goes_on_with_its_prefix(tmp_path):
    there(tmp_path, "CKP-1_5", "CKP_1-1_5", "CKP_2-1_5")
    resumed = tmp_path / "CKP_1-1_5"
    assert choose_prefix(tmp_path, "CKP", "r2", resumed) == "CKP_1"


def test_who_goes_on_from_a_dump_goes_on_with_the_newest(tmp_path):
    there(tmp_path, "CKP-1_5", "CKP_2-1_5", "CKP_1-1_5")
    dump = tmp_path / "tft_saved_checkpoints-step_9"
    assert choose_prefix(tmp_path, "CKP", "r2", dump) == "CKP_1"
    assert choose_prefix(tmp_path / "empty", "CKP", "r2", dump) == "CKP"


def test_who_goes_on_from_a_dump_of_a_known_run_leaves_strangers_alone(tmp_path):
    there(tmp_path, "CKP-1_5", "CKP_2-1_5")
    there(tmp_path, "CKP_1-1_5", "CKP-1_6", run="stranger")
    dump = tmp_path / "tft_saved_checkpoints-step_9"
    assert choose_prefix(tmp_path, "CKP", "r2", dump, ("r1",)) == "CKP_2"
    assert choose_prefix(tmp_path, "CKP", "r2", dump, ("r0",)) == "CKP_3"
    assert choose_prefix(tmp_path, "CKP", "r1", None) == "CKP_2"


def test_an_attempt_that_begins_anew_is_the_same_run(tmp_path):
    there(tmp_path, "CKP-1_5")
    there(tmp_path, "CKP_1-1_5", run="r2")
    there(tmp_path, "CKP_2-1_5", run="r3")
    assert choose_prefix(tmp_path, "CKP", "r2", None) == "CKP_1"
