"""What is used inside torch is listed, and missed if it is not there."""

import ast
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from worker_hooks.training import torch_names
from worker_hooks.training.torch_names import NEEDED

ROOT = Path(__file__).parents[4]
PYTHONS = {  # the same of Python, numpy and ours
    *("_replace", "_asdict", "_make", "_fields", "_exit", "_getframe", "_current_frames"),
    *("_active", "_set_native_id", "_FuncPointer", "_is_gil_enabled", "_registry", "_random"),
    *("_bit_generator", "_io"),
}
REPLACED = {  # what has a fall-back where it is used, and what that is
    "_get_sequence_number_for_group": "a group that does not count has made no collectives",
    "_timeout": "a group that is made again has gloo's time-out of 30 minutes",
    "_remove_autograd_hooks": "an earlier DDP stays hooked to its parameters; the log says so",
    "_sync_module_states": "a DDP that is made again broadcasts its parameters",
    "_join_config": "uneven counts of batches are not noticed",
    "_comm_hooks": "the state of DDP's hooks is not named",
    "_create_c10d_store": "a second death while ranks meet costs a restart; the log says so",
    "_cuda_hasPrimaryContext": "all CUDA devices count as used",
    "_engine_run_backward": "a hang in backward is taken for one in the script",
    "_del_library": "a rank exits 60 ms later",
    "_dynamo": "the first optimizer imports it",
    "_orig_mod": "the names of a compiled module's parameters have another prefix",
    "_checkpoint_wrapped_module": "so have those of a module with activation checkpoints",
    "_schedulers": "the schedulers inside a scheduler are not known",
    "_is_in_bad_fork": "a fork of a process that has called the driver is noticed by torch alone",
    "_group_start": "communicators are aborted one after the other",
    "_group_end": "the same",
    **dict.fromkeys(
        ("_get_fsdp_state", "_fsdp_param_groups", "_module_info"),
        "a module that FSDP has cut is refused",
    ),
    **dict.fromkeys(
        ("_op_dispatcher", "_custom_op_handlers", "_dispatch_get_all_op_names", "_schema"),
        "changes by _foreach functions are found by the audit alone; the log says so",
    ),
    "_foreach_add_": "the same",
    "_st_info": "parameters that leave their modules are said to have changed, and are not saved",
    **dict.fromkeys(
        (
            *("_register_backend", "_device_types", "_set_default_backend", "_is_root"),
            *("_set_sequence_number_for_group", "_new_process_group_helper"),
            *("_set_group_name", "_set_group_desc"),
            *("_store_based_barrier", "_unsharded_param"),
            *("_PipelineSchedule", "_stage_forward_initialized", "_stage_backward_initialized"),
            *("_stages_forward_initialized", "_stages_backward_initialized"),
        ),
        "no rank is replaced alone beside groups of the script's own; the first line says so",
    ),
    **dict.fromkeys(
        (
            *("_distributed_c10d", "_get_work_registry_size"),
            *("_AsyncWriterThread", "_queue", "_record_writer"),  # TensorBoard's
            "_RefreshThread",  # Rich's
        ),
        "no shadows are made; the first line says so",
    ),
    **dict.fromkeys(
        (
            *("_MultiProcessingDataLoaderIter", "_reset", "_next_index", "_DatasetKind"),
            *("_dataset_kind", "_dataset", "_auto_collation", "_drop_last", "_timeout"),
            *("_collate_fn", "_persistent_workers", "_prefetch_factor", "_base_seed"),
            *("_rcvd_idx", "_send_idx", "_task_info", "_tasks_outstanding", "_index_queues"),
            *("_worker_result_queue", "_data_queue", "_workers_done_event", "_shutdown"),
            *("_worker_pids_set", "_set_worker_pids", "_remove_worker_pids"),
            *("_children", "_popen", "_args", "_thread", "_reader", "_writer", "_semlock"),
            *("_cond", "_lock", "_sleeping_count", "_woken_count", "_wait_semaphore", "_flag"),
            *("_rlock", "_wlock", "_sem"),
        ),
        "no shadows are made of a script whose loaders have workers; its first line says so",
    ),
    "_handle": "every FullyShardedDataParallel counts as one that cuts its parameters",
    **dict.fromkeys(
        (
            *("_local_shard", "_fully_sharded_module", "_use_orig_params", "_param_infos"),
            *("_params", "_shared_param_infos"),
        ),
        "what FullyShardedDataParallel has cut is read between steps alone; the first line says so",
    ),
    "_get_root_mesh": "a strategy file has the parts of the ranks of the tensor's own mesh",
    "_step_count": "a scheduler is known by its epoch alone",
}
LISTED = {name for names in NEEDED.values() for name in names.split()} | REPLACED.keys()
HOLDERS = {part for holder in NEEDED for part in re.split("[ .]", holder)}
OWN = {"self", "cls", "old", "cold"}  # objects of the class itself


@pytest.fixture(autouse=True)
def _asked_anew():
    torch_names.lacking.cache_clear()
    yield
    torch_names.lacking.cache_clear()


def is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def of_others(tree):
    """Private names of objects that are not the class's own, and those that are looked up by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in OWN):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from filter(is_private, [*node.module.split("."), *parts])
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from filter(is_private, parts)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and is_private(name):
                yield name


def test_every_private_name_is_listed_with_what_is_done_without_it():
    unlisted = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("worker_hooks", "agent")
        for path in (ROOT / folder).rglob("*.py")
        if "check_version(" not in path.read_text()  # a framework's adapter names its versions
        for name in of_others(ast.parse(path.read_text()))
        if name not in LISTED | HOLDERS | PYTHONS
    }
    assert unlisted == set()


def test_every_listed_name_is_used():
    used = "\n".join(
        path.read_text()
        for folder in ("worker_hooks", "agent")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "torch_names.py"
    )
    public = {"autograd", "backward"}  # of a line of torch's own
    assert {name for name in LISTED - public if not re.search(rf"\b{name}\b", used)} == set()


def test_this_torch_lacks_nothing():
    assert torch_names.lacking() == ()
    assert torch_names.why_nothing_is_promised() == ""


@pytest.mark.parametrize("holder", NEEDED)
def test_a_name_that_is_gone_is_missed_wherever_it_was(holder, monkeypatch):
    monkeypatch.setitem(NEEDED, holder, NEEDED[holder] + " _that_is_gone")
    name = f"{holder.split()[-1]}._that_is_gone"
    assert torch_names.lacking() == (name,)
    why = torch_names.why_nothing_is_promised()
    assert why == f"torch {torch.__version__} lacks {name}"


def test_what_held_the_names_is_missed_with_all_of_them(monkeypatch):
    monkeypatch.setattr(torch_names, "NEEDED", {"torch.of_another_time Thing": "_a _b"})
    assert torch_names.lacking() == ("Thing._a", "Thing._b")


def test_a_function_of_torch_that_is_gone_is_missed(monkeypatch):
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    assert torch_names.lacking() == ("torch.distributed.distributed_c10d._get_default_store",)


def test_a_backward_that_goes_another_way_is_missed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: self)
    assert torch_names.lacking() == ("Tensor.backward.autograd", "Tensor.backward.backward")


class Base:
    def __init__(self):
        self._set_by_a_base = 1


class Thing(Base):
    _annotated: int

    def __init__(self):
        super().__init__()
        super().__setattr__("_set_by_name", 1)

    def lay_out(self):
        self._set_by_a_method = 1


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("_set_by_a_base", True),
        ("_set_by_name", True),
        ("_set_by_a_method", True),
        ("lay_out", True),
        ("_set", False),
        ("_annotated", False),  # says what it would be, if it were there
    ],
)
def test_attributes_of_objects_are_found_without_one(name, is_there, monkeypatch):
    monkeypatch.setattr(sys.modules[torch.__name__], "Thing", Thing, raising=False)
    monkeypatch.setattr(torch_names, "NEEDED", {"torch Thing": name})
    assert (torch_names.lacking() == ()) == is_there


def test_a_torch_without_anything_distributed_has_no_such_names(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    assert torch_names.lacking() == ()


def test_no_start_is_slower_for_it():
    began = time.thread_time()
    torch_names.lacking()
    assert time.thread_time() - began < 0.02  # it takes less than a millisecond
