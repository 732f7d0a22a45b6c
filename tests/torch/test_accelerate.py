"""A training with Accelerate ends as the plain one, whatever rank is killed."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType
from support.framework_jobs import SAMPLES, alone, result, struck, torchrun
from support.jobs import Launcher

from worker_hooks.adapters import accelerate as adapter
from worker_hooks.adapters.accelerate import protect, why_not
from worker_hooks.adapters.tested_versions import check_version
from worker_hooks.drill.plan import Fault, Moment

pytestmark = pytest.mark.torch
WARM_IMPORTS = ("accelerate",)
PLAIN = SAMPLES / "accelerate/plain.py"
PROTECTED = SAMPLES / "accelerate/protected.py"
KILLER = """
def strike(epoch):
    file = f"killed-{epoch}"
    if f"{epoch} {accelerator.process_index}" in {"1 0", "2 1"} and not os.path.exists(file):
        open(file, "w").close()
        os.kill(os.getpid(), 9)


"""


@pytest.fixture(scope="module")
def expected(launcher: Launcher) -> list[str]:
    """What the plain script prints."""
    return result(alone(launcher, PLAIN))


def test_the_protected_script_trains_the_same_under_torchrun(launcher, expected):
    assert result(torchrun(launcher, PROTECTED)) == expected


def test_ranks_are_replaced_in_all_parts_of_a_step_and_amid_accumulation(launcher, expected):
    faults = [
        Fault(1, 3, Moment.BACKWARD),  # of the first of two micro-batches
        Fault(0, 9, Moment.UPDATE),
        Fault(0, 15, Moment.DATA),
        Fault(1, 22, Moment.COMMIT),
        Fault(0, 33, Moment.DATA),
        Fault(1, 43, Moment.ANY, delay=0.6),
    ]
    ended = struck(launcher, PROTECTED, "replaced", faults)
    assert result(ended) == expected
    assert ended.err.count("no step is lost") == 1 + len(faults), ended.err


def test_a_death_in_a_validation_repeats_it(launcher, tmp_path, expected):
    text = PROTECTED.read_text().replace("import argparse\n", "import argparse\nimport os\n")
    head, line, rest = text.partition("def train(state):")
    within = "            right.append("
    assert within in rest
    rest = rest.replace(within, f"            strike(epoch)\n{within}")
    (script := tmp_path / "killed.py").write_text(head + KILLER + line + rest)
    ended = struck(launcher, script, "validation", ())
    assert result(ended) == expected
    assert ended.err.count("is back after") == 2, ended.err


def test_all_ranks_are_restarted_from_the_step(launcher, expected):
    faults = [Fault(0, 20, Moment.FORWARD), Fault(1, 29, Moment.BACKWARD)]
    options = ("--on-failure=dump,restart", "--max-restarts=2")
    ended = struck(launcher, PROTECTED, "restarted", faults, *options)
    assert result(ended) == expected
    assert "is back after" not in ended.err


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    for shared in ("AcceleratorState", "GradientState", "PartialState"):
        getattr(__import__("accelerate.state", fromlist=[shared]), shared)._reset_state()


def test_what_is_not_protected_is_refused(accelerator, monkeypatch):
    assert why_not(accelerator) == ""
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr(type(accelerator), "distributed_type", kind)
        assert why_not(accelerator) == f"accelerate's {kind.value} is not supported, DDP is"
    monkeypatch.undo()
    monkeypatch.setattr(accelerator.dataloader_config, "use_stateful_dataloader", True)
    assert "use_stateful_dataloader is not supported" in why_not(accelerator)
    monkeypatch.undo()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(ValueError, match="msrun cannot protect this training: automatic_checkp"):
        protect(accelerator, model=None)


def test_what_is_no_accelerator_is_refused():
    with pytest.raises(TypeError, match=r"protect\(\) takes your Accelerator, not int"):
        protect(3)


def test_another_version_is_refused(accelerator, monkeypatch):
    monkeypatch.setattr(adapter, "__version__", "1.99.0")
    with pytest.raises(ImportError, match=r"with accelerate 1.15, and 1.99.0 is installed"):
        protect(accelerator)
    assert check_version("accelerate", "1.15.9rc1") is None
