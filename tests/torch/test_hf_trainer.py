"""A training by Hugging Face's Trainer ends as the plain one, whatever rank is killed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.framework_jobs import SAMPLES, alone, result, struck
from support.jobs import Launcher
from support.late import Late

from worker_hooks.drill.plan import Fault, Moment

accelerate = Late("accelerate.utils")
transformers = Late("transformers")
adapter = Late("worker_hooks.adapters.hf")
pytestmark = pytest.mark.torch
WARM_IMPORTS = ("transformers.trainer",)
PLAIN = SAMPLES / "hugging_face/plain.py"
PROTECTED = SAMPLES / "hugging_face/protected.py"
PRELOAD = "--preload=transformers.trainer,worker_hooks.adapters.hf"


@pytest.fixture(scope="module")
def expected(launcher: Launcher) -> list[str]:
    """What the plain script prints."""
    return result(alone(launcher, PLAIN))


def test_ranks_are_replaced_in_all_parts_of_a_step(launcher, expected):
    """An epoch has 13 updates of two micro-batches; each third is logged, each sixth evaluated."""
    faults = [
        Fault(1, 3, Moment.BACKWARD),
        Fault(0, 6, Moment.UPDATE),
        Fault(0, 14, Moment.DATA),  # the first of an epoch
        Fault(1, 20, Moment.COMMIT),
        Fault(0, 25, Moment.FORWARD),
        Fault(1, 31, Moment.ANY, delay=0.6),
    ]
    ended = struck(launcher, PROTECTED, "replaced", faults, PRELOAD)
    assert result(ended) == expected
    assert ended.err.count("no step is lost") == 1 + len(faults), ended.err


def test_all_ranks_are_restarted_from_the_step_and_one_dies_after_the_last(launcher, expected):
    faults = [Fault(0, 13, Moment.UPDATE), Fault(1, 39, Moment.COMMIT)]
    options = ("--on-failure=dump,restart", "--max-restarts=2")
    ended = struck(launcher, PROTECTED, "restarted", faults, *options)
    assert result(ended) == expected
    assert "is back after" not in ended.err


KILLER = """
import os
from transformers import TrainerCallback


class Killer(TrainerCallback):
    def strike(self, event, step):
        file = f"killed-{event}-{step}"
        if not os.path.exists(file):
            open(file, "w").close()
            os.kill(os.getpid(), 9)

    def on_evaluate(self, args, state, control, **_):
        if state.global_step == 6 and os.environ["RANK"] == "0":
            self.strike("evaluate", 6)

    def on_save(self, args, state, control, **_):
        if state.global_step == 24 and os.environ["RANK"] == "1":
            self.strike("save", 24)

    def on_epoch_end(self, args, state, control, **_):
        if state.global_step in {13, 39} and os.environ["RANK"] == "0":
            self.strike("end", state.global_step)


trainer.add_callback(Killer())
"""


def test_a_death_behind_a_step_repeats_what_the_trainer_does_there(launcher, tmp_path, expected):
    head, line, rest = PROTECTED.read_text().partition("trainer = protect(trainer)\n")
    (script := tmp_path / "killed.py").write_text(head + KILLER + line + rest)
    ended = struck(launcher, script, "behind", (), PRELOAD)
    assert result(ended) == expected
    assert len([*(launcher.tmp / "behind").glob("killed-*")]) == 4
    assert ended.err.count("is back after") == 4, ended.err


def test_a_training_that_is_stopped_early_and_one_by_epochs_end_alike(launcher, tmp_path):
    text = PLAIN.read_text()
    for old, new in (
        ('eval_strategy="steps"', 'eval_strategy="epoch", logging_strategy="epoch"'),
        ('save_strategy="steps"', 'save_strategy="epoch"'),
        ("warmup_steps=5", 'lr_scheduler_type="reduce_lr_on_plateau", dataloader_num_workers=1'),
        ("default=50", "default=1"),
        ("default=3", "default=6"),
        ("gradient_accumulation_steps=2", "gradient_accumulation_steps=5"),
    ):
        assert old in text
        text = text.replace(old, new)
    (plain := tmp_path / "epochs.py").write_text(text)
    changed = text.replace(
        "parser = ", "from worker_hooks.adapters.hf import protect\nparser = ", 1
    )
    changed = changed.replace("trainer.train()", "protect(trainer).train()")
    (protected := tmp_path / "protected.py").write_text(changed)
    expected = result(alone(launcher, plain))
    faults = [Fault(1, 6, Moment.DATA), Fault(0, 10, Moment.COMMIT)]
    ended = struck(launcher, protected, "epochs", faults, PRELOAD)
    assert result(ended) == expected


@pytest.fixture
def trainer(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    return transformers.Trainer(
        model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": 1}] * 4
    )


def test_what_is_not_protected_is_refused(trainer, monkeypatch):
    assert adapter.why_not(trainer) == ""
    for kind in (accelerate.DistributedType.FSDP, accelerate.DistributedType.DEEPSPEED):
        monkeypatch.setattr(type(trainer.accelerator), "distributed_type", kind)
        assert f"accelerate's {kind.value} is not supported" in adapter.why_not(trainer)
    monkeypatch.undo()
    for name, value in (
        ("auto_find_batch_size", True),
        ("torch_compile", True),
        ("optim", "galore_adamw_layerwise"),
        ("_n_gpu", 2),
    ):
        monkeypatch.setattr(trainer.args, name, value)
        assert adapter.why_not(trainer), name
        monkeypatch.undo()
    monkeypatch.setattr(trainer.args, "auto_find_batch_size", True)
    with pytest.raises(ValueError, match="msrun cannot protect this training: auto_find_batch"):
        adapter.protect(trainer)


def test_another_version_and_another_object_are_refused(trainer, monkeypatch):
    with pytest.raises(TypeError, match=r"protect\(\) takes your Trainer, not int"):
        adapter.protect(3)
    monkeypatch.setattr("worker_hooks.adapters.hf.__version__", "5.99.0")
    with pytest.raises(ImportError, match=r"transformers 5.23 to 5.24, and 5.99.0 is installed"):
        adapter.protect(trainer)


def test_it_stays_the_trainer_that_it_was(trainer):
    kind = type(trainer)
    assert adapter.protect(trainer) is trainer
    assert isinstance(trainer, kind)
    assert type(trainer).__name__ == "Trainer"
    assert adapter.why_not(trainer) == "protect() was called before"


def test_a_checkpoint_of_the_trainers_own_and_a_search_are_refused(trainer):
    adapter.protect(trainer)
    with pytest.raises(ValueError, match="cannot protect a hyperparameter search"):
        trainer.protection.train(None, {"trial": 3})
    with pytest.raises(ValueError, match="call train\\(\\) without resume_from_checkpoint"):
        trainer.protection.train(None, {"resume_from_checkpoint": "trained/checkpoint-3"})
    with pytest.raises(ValueError, match="msrun protects one call of train"):
        trainer.protection.train(None, {})


def test_the_log_of_a_new_rank_lacks_times_alone(trainer):
    trainer.state.log_history += [{"loss": 0.1, "step": 1}, {"eval_loss": 2.0, "eval_runtime": 0.3}]
    assert adapter._plain(np.float32(0.5)) == 0.5  # what else is logged ends no training
    assert adapter._plain("x") == "x"
    progress = adapter.TrainerProgress(trainer)
    saved = progress.state_dict()
    trainer.state.log_history.append({"loss": 0.2, "step": 2})
    assert progress.state_dict()["log_history"] != saved["log_history"]
    progress.load_state_dict(saved)
    progress.apply()
    assert [*trainer.state.log_history[1]] == ["eval_loss", "eval_runtime"]  # of a rank that lives
    other = adapter.TrainerProgress(trainer)
    other.load_state_dict(saved)
    other.apply()
    assert trainer.state.log_history == [{"loss": 0.1, "step": 1}, {"eval_loss": 2.0}]


def test_a_callback_that_nothing_keeps_is_named(trainer, caplog):
    class Counts(transformers.TrainerCallback):
        def __init__(self):
            self.count = 0

    trainer.add_callback(Counts())
    adapter.protect(trainer)
    trainer.protection._say_unsaved()
    assert "callback Counts has values that begin anew" in caplog.text
    assert caplog.text.count("callback") == 1
