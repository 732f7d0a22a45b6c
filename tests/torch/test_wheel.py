"""The wheel: it holds every package, and a job runs from it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.jobs import ROOT, WORKERS

pytestmark = pytest.mark.torch
PACKAGES = ("msrun", "agent", "worker_hooks")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"


def sources() -> set[str]:
    """All files that belong to the packages."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.*"))
    return {str(path.relative_to(ROOT)) for path in found if path.suffix in {".py", ".typed"}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "dist").iterdir()
    return built


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == sources()


def test_a_job_runs_from_it_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The venv sees the packages that are installed beside pytest, but no editable install."""
    venv.create(tmp_path / "venv", symlinks=True)
    bin_folder = tmp_path / "venv" / "bin"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", f"--python={bin_folder / 'python'}", "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--quiet", wheel], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [bin_folder / "msrun", "--worker_num=2", WORKERS / "train_small.py", "--epochs=1"],
        env={**kept, "OMP_NUM_THREADS": "1"},
        cwd=empty,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained to step 8") == 2, done.stdout
    assert os.listdir(empty) == [], "nothing is left behind"
