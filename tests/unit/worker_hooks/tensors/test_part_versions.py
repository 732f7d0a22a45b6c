"""Changes of distributed tensors are counted on this rank's parts, however a script makes them."""

import pytest
import torch
from support.meshes import mesh_seen_by
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from worker_hooks.tensors import part_versions
from worker_hooks.tensors.part_versions import PartVersions
from worker_hooks.tensors.placements import distributed


@pytest.fixture
def mesh():
    with mesh_seen_by(0) as mesh:
        yield mesh


@pytest.fixture
def weights(mesh):
    def one():
        return DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)

    made = [nn.Parameter(one()) for _ in range(3)]
    with torch.no_grad():
        torch._foreach_mul_(made, 1.0)  # the dispatcher has made up its mind before it is watched
    return made


@pytest.fixture
def versions(weights):
    return PartVersions(distributed([*weights, torch.zeros(1)]))


def counted(versions):
    """How often the parts were changed since the last call."""
    before = [part._version for part in versions._parts]
    versions.count_on()
    return [part._version - was for part, was in zip(versions._parts, before, strict=True)]


def by_each(weights):
    weights[0].add_(1)
    weights[0].mul_(2)


BY_LISTS = {
    "scalar": lambda some: torch._foreach_mul_(some, 0.99),
    "list": lambda some: torch._foreach_add_(some, [each.detach() for each in some], alpha=0.1),
    "average": lambda some: torch._foreach_lerp_(some, [each.detach() for each in some], 0.1),
    "clamp": lambda some: torch._foreach_clamp_min_(some, 0.5),
    "tuple": lambda some: torch._foreach_add_(tuple(some), 1.0),
    "detached": lambda some: torch._foreach_mul_([each.detach() for each in some], 0.99),
    "data": lambda some: torch._foreach_mul_([each.data for each in some], 0.99),
    "a view": lambda some: torch._foreach_mul_([each[:, :2] for each in some], 0.99),
    "state_dict": lambda some: torch._foreach_mul_(
        list(nn.ParameterList(some).state_dict().values()), 0.99
    ),
}


@torch.no_grad()
def test_what_torch_counts_on_a_distributed_tensor_alone_is_counted_on_its_part(weights, versions):
    by_each(weights)
    assert counted(versions) == [2, 0, 0]
    assert counted(versions) == [0, 0, 0]


@pytest.mark.parametrize("way", BY_LISTS)
@torch.no_grad()
def test_what_torch_counts_nowhere_is_counted_on_the_parts(weights, versions, way):
    before = [each._local_tensor.clone() for each in weights]
    assert counted(versions) == [0, 0, 0]
    for _ in range(2):
        BY_LISTS[way](weights[1:])
    assert not torch.equal(weights[2]._local_tensor, before[2]) or way in {"average", "clamp"}
    assert counted(versions) == [0, 2, 2]
    assert counted(versions) == [0, 0, 0]


def test_in_inference_mode_too(weights, versions):
    with torch.inference_mode():
        torch._foreach_mul_(weights, 0.99)
    assert counted(versions) == [1, 1, 1]


@torch.no_grad()
def test_two_that_count_the_same_miss_nothing(weights, versions):
    other = PartVersions(distributed(weights[:1]))
    torch._foreach_mul_(weights, 0.99)
    assert counted(versions) == [1, 1, 1]
    assert counted(other) == [1]


@torch.no_grad()
def test_gradients_and_what_is_not_registered_do_not_count(mesh, versions):
    others = [DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)]
    seen = len(part_versions._changes)
    torch._foreach_mul_(others, 0.99)
    assert counted(versions) == [0, 0, 0]
    assert len(part_versions._changes) == seen


@torch.no_grad()
def test_a_function_that_fails_goes_on_being_watched(weights, versions):
    with pytest.raises(RuntimeError):
        torch._foreach_mul_(weights, [1.0])
    torch._foreach_mul_(weights, [1.0, 2.0, 3.0])
    assert all(counted(versions))


@torch.no_grad()
def test_handlers_that_a_context_of_torch_puts_back_are_given_again(weights, monkeypatch):
    dispatcher = DTensor._op_dispatcher
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", {})
    versions = PartVersions(distributed(weights))
    dispatcher._custom_op_handlers = {}
    assert counted(versions) == [0, 0, 0]
    torch._foreach_mul_(weights, 0.99)
    assert counted(versions) == [1, 1, 1]


def missing():
    raise AttributeError("_custom_op_handlers")


@pytest.mark.parametrize("handlers", [missing, dict])  # in the latter nobody looks
def test_a_torch_that_does_not_tell_is_named_once(weights, monkeypatch, caplog, handlers):
    monkeypatch.setattr(part_versions, "_said", set())
    monkeypatch.setattr(part_versions, "_handlers", handlers)
    for _ in range(2):
        found = PartVersions(distributed(weights))
    found.count_on()
    with torch.no_grad():
        by_each(weights)  # is still seen
    assert counted(found) == [2, 0, 0]
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith(f"torch {torch.__version__} does not tell msrun which distributed ")


def test_an_update_is_not_disturbed(weights, versions):
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        for each in weights:
            each.grad = torch.ones_like(each)
        torch.optim.AdamW(weights, **options).step()
        assert min(counted(versions)) >= 1


def test_other_tensors_are_not_slowed_down():
    assert PartVersions(distributed([torch.zeros(1)])).tensors == []
