"""A resumed DDP reduces as the undisturbed one would have: the same sums, bit for bit."""

import gc
import importlib.util
import json
import logging
import threading

import pytest
import torch
import torch.distributed as dist
from support.jobs import WORKERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.distributed import ddp_bucket_order as ours

pytestmark = pytest.mark.torch

WORKER = WORKERS / "ddp_rehearsal.py"


def cases():
    spec = importlib.util.spec_from_file_location("ddp_rehearsal", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(module.CASES)


NEVER_REBUILT = {"unused"}
TOO_EARLY = {  # torch learns the order a step later
    ("static graph", 1),
    ("static graph, unused", 1),
    ("static graph, unused", 2),
}


@pytest.fixture(scope="module")
def seen(launcher):
    """A job of four processes: every case undisturbed, then resumed from several steps."""
    ended = launcher.run("--nproc-per-node=4", WORKER, launcher.tmp)
    assert ended.code == 0, ended.err
    return json.loads((launcher.tmp / "seen.json").read_text())


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("name", cases())
def test_resumed_weights_are_the_undisturbed_ones(seen, name, after):
    undisturbed, resumed = seen["undisturbed"][name], seen["resumed"][f"{name}, {after}"]
    is_early = (name, after) in TOO_EARLY
    may = name not in NEVER_REBUILT and not is_early
    assert resumed["done"] == [may] * len(resumed["done"])
    if not is_early:
        assert resumed["digest"] == undisturbed["digest"]
        assert resumed["layout"] == undisturbed["layout"]
        assert resumed["told again"] == resumed["recorded"]


@pytest.mark.parametrize("name", [name for name in cases() if name not in NEVER_REBUILT])
def test_without_rehearsal_they_differ(seen, name):
    resumed = seen["resumed"][f"{name}, 3, unrehearsed"]
    assert resumed["digest"] != seen["undisturbed"][name]["digest"]


def test_there_is_something_to_lay_out(seen):
    buckets = {name: case["layout"] for name, case in seen["undisturbed"].items()}
    assert len(buckets["small caps"][0]) >= 3
    assert len(buckets["default caps"][0]) >= 2
    assert len(buckets["dtypes"][0]) >= 3
    assert len(buckets["sparse"][0]) > len(buckets["small caps"][0])


# One process, a world of one.


@pytest.fixture(scope="module")
def first_group():
    """What a process opens for its first group and first DDP, it keeps."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained(DistributedDataParallel(net()))
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture
def group(first_group):  # noqa: ARG001
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a DDP of the test first: it must not end the group
    dist.destroy_process_group()


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(ours, "_warned", set())
    caplog.set_level(logging.WARNING, "msrun")
    return caplog


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def find(module):
    return next(iter(ours.find_all([module])), None)


def trained(model, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        ours.learn(model)
    return model


@pytest.mark.usefixtures("group")
def test_the_wrapper_is_found_wherever_it_is():
    inner, other = net(), net()
    assert find(inner) is None
    wrapper = DistributedDataParallel(inner)
    assert find(wrapper) is wrapper
    assert find(inner) is wrapper
    assert find(inner[1]) is wrapper
    assert find(nn.ModuleDict({"a": wrapper})) is wrapper
    assert find(other) is None
    second = DistributedDataParallel(other)
    assert ours.find_all([other, inner]) == [second, wrapper]
    assert ours.find_all([nn.ModuleList([inner, other])]) == [wrapper, second]
    assert ours.find_all([inner, wrapper]) == [wrapper]

    class Derived(DistributedDataParallel):
        pass

    third = net()
    derived = Derived(third)
    assert find(third) is derived


@pytest.mark.usefixtures("group")
def test_the_wrapper_is_found_through_compiled_modules():
    inner = net()
    wrapper = DistributedDataParallel(torch.compile(inner, backend="eager"))
    assert find(inner) is wrapper
    assert find(torch.compile(inner, backend="eager")) is wrapper
    assert find(torch.compile(wrapper, backend="eager")) is wrapper


@pytest.mark.usefixtures("first_group")
def test_a_wrapper_of_a_group_that_is_gone_is_not_found():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inner = net()
    wrapper = DistributedDataParallel(inner)
    dist.destroy_process_group()
    assert find(inner) is None
    del wrapper
    gc.collect()


@pytest.mark.usefixtures("group")
def test_a_world_of_one_rehearses_too():
    order = ours.ready_order(trained(DistributedDataParallel(net())))
    assert sorted(order) == [0, 1, 2, 3]
    assert order[-2:] in ([0, 1], [1, 0])
    fresh = DistributedDataParallel(net())
    assert ours.ready_order(fresh) is None
    assert ours.rehearse(fresh, order)
    assert ours.ready_order(fresh) == order
    assert not ours.rehearse(fresh, order)
    trained(fresh, 4)
    assert ours.ready_order(fresh) == order


@pytest.mark.usefixtures("group")
def test_a_trained_model_is_left_alone(said):
    model = trained(DistributedDataParallel(net()), 2)
    order = ours.ready_order(model)
    assert not ours.rehearse(model, order[::-1])
    assert ours.ready_order(trained(model, 2)) == order
    assert said.messages == []


@pytest.mark.usefixtures("group")
def test_gradients_that_are_there_stay():
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3)
    assert ours.rehearse(model, [3, 2, 1, 0])
    assert all((parameter.grad == 3).all() for parameter in model.parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("order", [None, [0, 1], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_a_foreign_order_is_refused_with_a_sentence(said, order):
    model = DistributedDataParallel(net())
    assert not ours.rehearse(model, order)
    assert not ours.rehearse(model, order)
    assert len(said.messages) == 1
    assert "recorded" in said.messages[0]
    assert len(ours.ready_order(trained(model, 3))) == 4


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["bucket_bytes_cap", "_has_rebuilt_buckets", "_join_config"])
def test_another_torch_is_said_once(said, monkeypatch, name):
    model = DistributedDataParallel(net())
    order = ours.ready_order(trained(DistributedDataParallel(net())))
    monkeypatch.delattr(model, name)
    assert not ours.rehearse(model, order)
    assert not ours.rehearse(model, order)
    assert len(said.messages) == 1
    assert name in said.messages[0]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["_has_rebuilt_buckets", "_join_config"])
def test_another_torch_is_seen_while_training(monkeypatch, name):
    model = trained(DistributedDataParallel(net()))
    monkeypatch.delattr(model, name)
    whys = [ours.learn(model) for _ in range(3)]
    assert [bool(why) for why in whys] == [True, False, False]
    assert name in whys[0]
    assert ours.ready_order(model) is None


@pytest.mark.usefixtures("group")
def test_a_layout_by_another_rule_is_seen_while_training(monkeypatch):
    monkeypatch.setattr(ours, "_layout", lambda *_: [[0], [1, 2, 3]])
    model = DistributedDataParallel(net())
    whys = []
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        whys.append(ours.learn(model))
    (why,) = filter(None, whys)
    assert "(this torch lays them out by another rule)" in why
    assert ours.ready_order(model) is None


@pytest.mark.usefixtures("group")
def test_parameters_that_want_no_gradient_for_a_while_are_reduced_all_the_same():
    """As a GAN's discriminator does, while its generator is trained."""
    model, orders = DistributedDataParallel(net()), []
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        model.requires_grad_(False)
        assert ours.learn(model) == ""
        assert not any(each.requires_grad for each in model.parameters())
        model.requires_grad_(True)
        orders.append(ours.ready_order(model))
    assert orders[-1] == ours.ready_order(trained(DistributedDataParallel(net()), 4))


@pytest.mark.usefixtures("group")
def test_uneven_inputs_are_not_rehearsed(said):
    model = DistributedDataParallel(net())
    with model.join():
        assert not ours.rehearse(model, [3, 2, 1, 0])
    assert said.messages == []


@pytest.mark.usefixtures("group")
def test_what_was_learned_can_be_asked_while_the_reducer_is_locked():
    model = DistributedDataParallel(net())
    answers, asked, may_go_on = [], threading.Event(), threading.Event()

    def hook(_state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        asked.set()
        assert may_go_on.wait(20)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def listen():
        assert asked.wait(20)
        answers.append(ours.ready_order(model))
        may_go_on.set()

    model.register_comm_hook(None, hook)
    listener = threading.Thread(target=listen)
    listener.start()
    trained(model)
    listener.join()
    assert answers == [None]
    assert len(ours.ready_order(model)) == 4


@pytest.mark.usefixtures("group")
def test_torchs_switch_for_a_small_last_bucket(monkeypatch):
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    first = trained(DistributedDataParallel(net(), bucket_cap_mb=0.00005))
    order = ours.ready_order(first)
    trained(first, 3)
    assert ours.ready_order(first) == order
    second = DistributedDataParallel(net(), bucket_cap_mb=0.00005)
    assert ours.rehearse(second, order)
    trained(second, 3)
    name = "rebuilt_per_bucket_param_indices"
    assert first._get_ddp_logging_data()[name] == second._get_ddp_logging_data()[name]
    assert len(first._get_ddp_logging_data()[name].split(",")) > 1
