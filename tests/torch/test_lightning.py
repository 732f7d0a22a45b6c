"""A training by Lightning's Trainer ends as the plain one, whatever rank is killed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.framework_jobs import SAMPLES, alone, result, struck
from support.jobs import Launcher
from support.late import Late
from torch.utils.data import DataLoader, IterableDataset

from worker_hooks.drill.plan import Fault, Moment

lightning = Late("lightning")
adapter = Late("worker_hooks.adapters.lightning")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # Lightning's hints
WARM_IMPORTS = ("lightning",)
PLAIN = SAMPLES / "lightning/plain.py"
PROTECTED = SAMPLES / "lightning/protected.py"
OPTIONS = ("--preload=lightning.pytorch,worker_hooks.adapters.lightning", "--max-restarts=9")
KILLER = """
class Killer(L.Callback):
    def strike(self, event, trainer):
        if f"{event} {trainer.global_step} {os.environ['RANK']}" in PLACES:
            file = Path(f"killed-{event}-{trainer.global_step}")
            if not file.exists():
                file.touch()
                os.kill(os.getpid(), 9)

    def on_validation_start(self, trainer, _):
        if not trainer.sanity_checking:
            self.strike("start", trainer)

    def on_validation_end(self, trainer, _):
        self.strike("end", trainer)

    def on_train_batch_end(self, trainer, *_):
        self.strike("batch", trainer)

    def on_train_epoch_end(self, trainer, _):
        self.strike("epoch", trainer)


PLACES = {"start 14 1", "end 21 0", "batch 25 0", "epoch 28 1"}
"""


@pytest.fixture(scope="module")
def expected(launcher: Launcher) -> list[str]:
    """What the plain script prints."""
    return result(alone(launcher, PLAIN))


def test_a_death_in_each_part_of_a_step_loses_nothing(launcher, expected):
    faults = [
        Fault(1, 3, Moment.BACKWARD),
        Fault(0, 12, Moment.UPDATE),
        Fault(1, 15, Moment.DATA),
        Fault(0, 40, Moment.FORWARD),
    ]
    ended = struck(launcher, PROTECTED, "steps", faults, *OPTIONS)
    assert result(ended) == expected
    assert ended.err.count(": restart ") == len(faults), ended.err
    assert "trains in Lightning's loop, which cannot be entered twice" in ended.err


def test_a_death_behind_a_step_repeats_what_the_trainer_does_there(launcher, tmp_path, expected):
    """In a validation, behind one, between the update and its commit, at an epoch's end."""
    head, line, rest = PROTECTED.read_text().partition("L.seed_everything")
    rest = rest.replace("Protect(),", "Protect(), Killer(),")
    (script := tmp_path / "killed.py").write_text(head + KILLER + "\n\n" + line + rest)
    ended = struck(launcher, script, "behind", (), *OPTIONS)
    assert result(ended) == expected
    assert len([*(launcher.tmp / "behind").glob("killed-*")]) == 4
    assert ended.err.count(": restart ") == 4, ended.err


def test_accumulation_limits_and_early_stopping_end_alike(launcher, tmp_path):
    scripts = [tmp_path / "limited.py", tmp_path / "protected.py"]
    for script, original in zip(scripts, (PLAIN, PROTECTED), strict=True):
        text = original.read_text()
        for old, new in (
            ("val_check_interval=7", "accumulate_grad_batches=3, limit_train_batches=11"),
            ("patience=20", "patience=1, min_delta=0.3"),
            ("max_epochs=args.epochs", "max_epochs=9"),
            ("20, shuffle=True", "20, shuffle=True, num_workers=1"),
        ):
            assert old in text
            text = text.replace(old, new)
        script.write_text(text)
    expected = result(alone(launcher, scripts[0]))
    faults = [Fault(1, 4, Moment.COMMIT), Fault(0, 8, Moment.BACKWARD)]
    ended = struck(launcher, scripts[1], "limits", faults, *OPTIONS)
    assert result(ended) == expected


@cache
def one_layer():
    """A module's class."""

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

        def training_step(self, batch, _):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Net


def trainer(tmp_path, **options):
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1} | options
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(
        default_root_dir=tmp_path,
        **given,
        **dict.fromkeys(quiet, False),
        callbacks=[adapter.Protect()],
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "FSDPStrategy"}, "FSDPStrategy is not supported, DDPStrategy is"),
        ({"strategy": "ddp_fork", "devices": 2}, "ddp_spawn and ddp_fork are not supported"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs is not"),
    ],
)
def test_what_is_not_protected_is_refused(tmp_path, options, why):
    made = trainer(tmp_path)
    for name, value in options.items():
        if value == "FSDPStrategy":
            made._accelerator_connector.strategy = lightning.pytorch.strategies.FSDPStrategy()
        elif name == "strategy":
            made = trainer(tmp_path, **options)
        elif name != "devices":
            setattr(made, name, value)
    assert why in adapter.why_not(made, one_layer()())


def test_what_a_module_does_itself_is_refused(tmp_path):
    class Iterates(one_layer()):
        def training_step(self, dataloader_iter):
            raise NotImplementedError

    class Manual(one_layer()):
        automatic_optimization = False

    made = trainer(tmp_path)
    assert adapter.why_not(made, one_layer()()) == ""
    assert "takes a dataloader_iter is not supported" in adapter.why_not(made, Iterates())
    assert "automatic_optimization=False is not supported" in adapter.why_not(made, Manual())
    made.callbacks.append(lightning.pytorch.callbacks.StochasticWeightAveraging(0.1))
    assert "StochasticWeightAveraging is not supported" in adapter.why_not(made, one_layer()())


def test_a_loader_without_a_length_and_several_are_refused(tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            yield from torch.ones(4, 2)

    loader = DataLoader(torch.ones(4, 2))
    for loaders, why in (
        (DataLoader(Endless()), "its loader has no length"),
        ([loader, DataLoader(torch.ones(4, 2))], "it has several loaders"),
    ):
        with pytest.raises(ValueError, match=f"cannot protect this training: {why}"):
            trainer(tmp_path).fit(one_layer()(), loaders)


def test_a_checkpoint_of_lightnings_own_and_a_second_fit_are_refused(tmp_path):
    made = trainer(tmp_path)
    loader = DataLoader(torch.ones(4, 2))
    made.fit(net := one_layer()(), loader)
    assert made.global_step == 4
    with pytest.raises(ValueError, match="msrun protects one call of fit"):
        made.fit(net, loader)
    made.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=r"fit\(ckpt_path=...\) is not supported"):
        trainer(tmp_path).fit(one_layer()(), loader, ckpt_path=tmp_path / "own.ckpt")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("lightning.__version__", "2.99.0")
    with pytest.raises(ImportError, match=r"with lightning 2.6, and 2.99.0 is installed"):
        adapter.Protect()
