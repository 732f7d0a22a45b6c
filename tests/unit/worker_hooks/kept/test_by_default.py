"""Where no keeper is started although nobody has said that none is to be."""

import pytest
import torch

from worker_hooks.kept import by_default
from worker_hooks.kept.by_default import why_not_by_default


def test_on_a_machine_without_accelerators_it_is_started():
    assert why_not_by_default({"PATH": "/bin", "SLURM_JOB_ID": ""}) == ""


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("SLURM_JOB_ID", "Slurm"),
        ("PBS_JOBID", "PBS"),
        ("LSB_JOBID", "LSF"),
        ("SGE_TASK_ID", "Grid"),
    ],
)
def test_who_adds_up_the_memory_of_processes_would_count_it_twice(name, system):
    why = why_not_by_default({name: "17"})
    assert why.startswith(system)
    assert "twice" in why


@pytest.mark.parametrize("kind", ["cuda", "hip", "xpu"])
def test_where_the_script_may_use_an_accelerator_it_is_not(monkeypatch, tmp_path, kind):
    device = tmp_path / "device"
    monkeypatch.setattr(by_default, "_DEVICES", (str(tmp_path / "none"), str(device)))
    for each in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, each, "1.0" if each == kind else None, raising=False)
    assert why_not_by_default({}) == ""
    device.touch()
    assert why_not_by_default({}) == "the script may use an accelerator"
    monkeypatch.setattr(torch.version, kind, None)
    assert why_not_by_default({}) == ""  # this torch cannot


def test_an_accelerator_of_which_torch_itself_does_not_know_counts_too(monkeypatch, tmp_path):
    monkeypatch.setattr(by_default, "_OF_PLUGINS", (str(tmp_path),))
    assert why_not_by_default({}) == "the script may use an accelerator"
