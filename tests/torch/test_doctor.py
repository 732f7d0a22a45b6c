"""``msrun doctor`` and ``msrun bugreport`` as users call them, with the torch that is installed."""

from __future__ import annotations

import json
import tarfile
from importlib.metadata import version

import pytest
from support.jobs import WORKERS, Launcher

pytestmark = pytest.mark.torch


def test_the_real_torch_is_looked_at_and_reported(msrun: Launcher) -> None:
    assert msrun.run("--nproc-per-node=1", WORKERS / "leave.py", "rest=0").code == 0
    made = msrun.command("bugreport", "-o", "report.tar.gz")
    assert made.code == 0, made.err
    assert f"wrote {msrun.tmp}/report.tar.gz (" in made.out
    with tarfile.open(msrun.tmp / "report.tar.gz") as archive:
        (name,) = (one for one in archive.getnames() if one.endswith("/doctor.json"))
        file = archive.extractfile(name)
        assert file is not None
        found = {one["part"]: one for one in json.load(file)["findings"]}
    assert found["torch"]["grade"] == "ok"
    assert found["torch"]["found"].startswith(version("torch"))
    assert "gloo" in found["backends"]["found"]
