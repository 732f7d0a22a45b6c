"""``from msrun import TrainState``: the hooks' names, found under the name of the command."""

import subprocess
import sys
from pathlib import Path

import pytest

import msrun
import worker_hooks

ROOT = Path(__file__).parents[3]


OWN = ["LaunchError", "launch"]


def test_msrun_offers_every_public_name_of_the_hooks_and_its_own():
    assert msrun.__all__ == sorted([*worker_hooks.__all__, *OWN])
    for name in worker_hooks.__all__:
        assert getattr(msrun, name) is getattr(worker_hooks, name)
    for name in msrun.__all__:
        assert name in dir(msrun)
    assert [getattr(msrun, name).__name__ for name in OWN] == OWN


def test_an_unknown_name_is_refused_under_msruns_own_name():
    with pytest.raises(AttributeError, match="module 'msrun' has no attribute 'Trainstate'"):
        _ = msrun.Trainstate


def test_importing_msrun_loads_no_hooks_and_no_torch():
    code = "import msrun, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "worker_hooks", "agent", "click"} & set(done.stdout.split())
