"""What a user may ask of checkpoints: MindSpore's checks and precedence, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from worker_hooks import CheckpointConfig, ModelCheckpoint

NOTHING = {
    "save_checkpoint_steps": 0,
    "save_checkpoint_seconds": None,
    "keep_checkpoint_max": None,
    "keep_checkpoint_per_n_minutes": 0,
}


def test_the_defaults_are_mindspore_s():
    config = CheckpointConfig()
    assert (config.save_checkpoint_steps, config.save_checkpoint_seconds) == (1, 0)
    assert (config.keep_checkpoint_max, config.keep_checkpoint_per_n_minutes) == (5, 0)
    assert config.integrated_save is True
    assert not (config.async_save or config.exception_save or config.crc_check)
    assert not config.remove_redundancy and config.format == "safetensors"


@pytest.mark.parametrize(
    ("given", "steps_seconds", "most_minutes"),
    [
        ({"save_checkpoint_seconds": 9}, (1, 0), (5, 0)),
        ({"save_checkpoint_steps": 0, "save_checkpoint_seconds": 9}, (0, 9), (5, 0)),
        ({"save_checkpoint_steps": None, "save_checkpoint_seconds": 9}, (0, 9), (5, 0)),
        ({"save_checkpoint_steps": 0}, (0, 0), (5, 0)),
        ({"keep_checkpoint_per_n_minutes": 3}, (1, 0), (5, 0)),
        ({"keep_checkpoint_max": 0, "keep_checkpoint_per_n_minutes": 3}, (1, 0), (0, 3)),
        ({"keep_checkpoint_max": 0}, (1, 0), (1, 0)),
        ({"keep_checkpoint_max": None, "keep_checkpoint_per_n_minutes": None}, (1, 0), (1, 0)),
    ],
)
def test_precedence(given, steps_seconds, most_minutes):
    config = CheckpointConfig(**given)
    assert (config.save_checkpoint_steps, config.save_checkpoint_seconds) == steps_seconds
    assert (config.keep_checkpoint_max, config.keep_checkpoint_per_n_minutes) == most_minutes


@pytest.mark.parametrize("name", ["save_checkpoint_seconds", "keep_checkpoint_per_n_minutes"])
def test_what_is_ignored_is_said(name, caplog):
    with caplog.at_level(logging.WARNING, "msrun"):
        CheckpointConfig(**{name: 7})
    assert f"{name}=7 is ignored" in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (NOTHING, ValueError, "cannot all be 0"),
        ({"save_checkpoint_steps": -1}, ValueError, "at least 0"),
        ({"save_checkpoint_steps": True}, TypeError, "an integer"),
        ({"save_checkpoint_seconds": 1.5}, TypeError, "an integer"),
        ({"keep_checkpoint_max": "5"}, TypeError, "an integer"),
        ({"integrated_save": 1}, TypeError, "True or False"),
        ({"async_save": "fork"}, TypeError, "True or False"),
        ({"crc_check": None}, TypeError, "True or False"),
        ({"exception_save": "yes"}, TypeError, "True or False"),
        ({"remove_redundancy": 1}, TypeError, "True or False"),
        ({"saved_network": torch.nn.Linear(1, 1)}, ValueError, "TrainState"),
        ({"enc_key": b"0" * 16}, ValueError, "not encrypted"),
        ({"enc_mode": "SM4-CBC"}, ValueError, "not encrypted"),
        ({"format": "ckpt"}, ValueError, "pickle"),
        ({"format": "onnx"}, ValueError, "'safetensors'"),
        ({"incremental": True}, ValueError, "MapParameter"),
        ({"enable_redundance": True}, ValueError, "MindSpore"),
        ({"keep_max": 3}, TypeError, "no argument 'keep_max'"),
        ({"append_info": "epoch_num"}, TypeError, "a list"),
        ({"append_info": ["epoch"]}, ValueError, "epoch_num"),
        ({"append_info": [3]}, TypeError, "texts and one dict"),
        ({"append_info": [{"a": 1}, {"b": 2}]}, TypeError, "one dict"),
        ({"append_info": [{1: 1}]}, TypeError, "texts as keys"),
        ({"append_info": [{"a": torch.ones(1)}]}, TypeError, "TrainState"),
        ({"append_info": [{"a": float("nan")}]}, ValueError, "JSON"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(given, error, words):
    with pytest.raises(error) as caught:
        CheckpointConfig(**given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [True, "thread", "process"])
def test_mindspore_s_ways_of_async_are_one(mode):
    assert CheckpointConfig(async_save=mode).async_save is True


def test_a_split_model_is_not_integrated():
    config = CheckpointConfig(remove_redundancy=True, incremental=False)
    assert config.integrated_save is False


def test_what_is_appended():
    config = CheckpointConfig(append_info=["step_num", {"lr": 0.1, "name": "x"}])
    assert config.appended(2, 15) == {"step_num": 15, "lr": 0.1, "name": "x"}
    assert CheckpointConfig(append_info=["epoch_num"]).appended(2, 15) == {"epoch_num": 2}
    assert CheckpointConfig(append_info=[]).appended(2, 15) == {}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prefix": ""}, ValueError),
        ({"prefix": "a/b"}, ValueError),
        ({"prefix": "a\nb"}, ValueError),
        ({"prefix": len}, TypeError),
        ({"directory": 3}, TypeError),
        ({"config": {}}, TypeError),
    ],
)
def test_a_callback_that_cannot_be(given, error):
    with pytest.raises(error):
        ModelCheckpoint(**given)
