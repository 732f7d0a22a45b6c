"""MindSpore's names for the power-off checkpoint: what they take, refuse and mean."""

from pathlib import Path

import pytest
import torch

from worker_hooks.adapters.mindspore import OptTFTWrapper, TFTRegister, TrainFaultTolerance
from worker_hooks.training.startup import is_tft_enabled


@pytest.mark.parametrize("folder", ["./ttp", Path("ttp")])
def test_the_state_learns_its_folder(folder):
    assert TFTRegister(0, "127.0.0.1", 30051, folder).ckpt_save_path == str(folder)
    assert TrainFaultTolerance(folder).ckpt_save_path == str(folder)
    assert TrainFaultTolerance(ckpt_save_path=folder, initial_step=0).ckpt_save_path == str(folder)


def test_the_folder_may_be_told_elsewhere():
    assert TrainFaultTolerance().ckpt_save_path is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%eth0", "localhost", "node-1.x"])
@pytest.mark.parametrize("port", [0, 30051, 65535])
def test_addresses_and_ports_that_can_be(address, port):
    TFTRegister(3, address, port, "x")


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((-1, "127.0.0.1", 30051, "x"), ValueError, "ctrl_rank_id must be at least 0, not -1"),
        (("0", "127.0.0.1", 30051, "x"), TypeError, "ctrl_rank_id must be an integer, not '0'"),
        ((0, "", 30051, "x"), ValueError, "ctrl_ip must be an address or a host name, not ''"),
        ((0, "256.0.0.1", 30051, "x"), ValueError, "ctrl_ip must be an address"),
        ((0, "a b", 30051, "x"), ValueError, "ctrl_ip must be an address"),
        ((0, "-a", 30051, "x"), ValueError, "ctrl_ip must be an address"),
        ((0, None, 30051, "x"), TypeError, "ctrl_ip must be an address"),
        ((0, "127.0.0.1", -1, "x"), ValueError, "ctrl_port must be from 0 to 65535, not -1"),
        ((0, "127.0.0.1", 65536, "x"), ValueError, "ctrl_port must be from 0 to 65535, not 65536"),
        ((0, "127.0.0.1", "30051", "x"), TypeError, "ctrl_port must be an integer, not '30051'"),
        ((0, "127.0.0.1", True, "x"), TypeError, "ctrl_port must be an integer, not True"),
        ((0, "127.0.0.1", 30051, ""), ValueError, "ckpt_save_path must not be empty"),
        ((0, "127.0.0.1", 30051, None), TypeError, "ckpt_save_path must be a path, not None"),
        ((0, "127.0.0.1", 30051, b"x"), TypeError, "ckpt_save_path must be a path"),
    ],
)
def test_what_cannot_be_is_refused(args, error, text):
    with pytest.raises(error) as raised:
        TFTRegister(*args)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"ckpt_save_fn": print}, ValueError, "ckpt_save_fn cannot be used"),
        ({"ckpt_load_fn": print}, ValueError, "ckpt_load_fn cannot be used"),
        ({"initial_step": -1}, ValueError, "initial_step must be at least 0"),
        ({"inital_step": 1}, TypeError, "no argument 'inital_step'"),
        ({"ckpt_save_path": 3}, TypeError, "ckpt_save_path must be a path"),
    ],
)
def test_what_the_newer_name_refuses(kwargs, error, text):
    with pytest.raises(error) as raised:
        TrainFaultTolerance(**kwargs)
    assert text in str(raised.value)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


def test_the_optimizer_stays_what_it_is():
    given = optimizer()
    assert OptTFTWrapper(given) is given
    assert OptTFTWrapper(OptTFTWrapper(given), anything=1) is given
    assert TrainFaultTolerance.get_optimizer_wrapper(torch.optim.AdamW) is torch.optim.AdamW


@pytest.mark.parametrize("wrong", [None, "sgd", torch.optim.SGD, torch.nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(TypeError, match="opt must be a torch Optimizer"):
        OptTFTWrapper(wrong)


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear, optimizer])
def test_what_is_no_optimizers_class_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a torch Optimizer class"):
        TrainFaultTolerance.get_optimizer_wrapper(wrong)


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        (None, True),
        ("", True),
        ("{TTP:1}", True),
        ("{TTP:1,UCE:1,ARF:1}", True),
        ("{UCE:1}", True),
        ("{ TTP : 1 }", True),
        ("{TTP:0}", False),
        ("{UCE:1, TTP:0}", False),
    ],
)
@pytest.mark.parametrize("mindio", [None, "0", "1"])
def test_the_switch(text, enabled, mindio):
    given = {"MS_ENABLE_TFT": text, "MINDIO_FOR_MINDSPORE": mindio}
    environ = {name: value for name, value in given.items() if value is not None}
    assert is_tft_enabled(environ) is enabled


@pytest.mark.parametrize("text", ["yes", "TTP:1", "{TTP}", "{TTP:2}"])
def test_a_garbled_switch_is_named(text):
    with pytest.raises(ValueError) as raised:
        is_tft_enabled({"MS_ENABLE_TFT": text})
    assert str(raised.value).startswith(f"MS_ENABLE_TFT={text} must be like")
