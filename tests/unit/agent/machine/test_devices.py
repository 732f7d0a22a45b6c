"""Counting devices without torch."""

from __future__ import annotations

import os

import pytest

from agent.machine.devices import (
    DeviceCounts,
    cpu_count,
    device_count,
    gpu_count,
    nvml_count,
    visible,
)
from agent.spec.job_spec import UsageError


def _machine(tmp_path, *, nvml=None, dev=(), simd=(), vendors=()):
    (tmp_path / "dev").mkdir()
    for name in dev:
        (tmp_path / "dev" / name).touch()
    for index, count in enumerate(simd):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(index)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {count}\nmem_banks 1\n")
    for index, vendor in enumerate(vendors):
        device = tmp_path / f"sys/class/drm/renderD{128 + index}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
    return DeviceCounts(tmp_path / "dev", tmp_path / "sys", lambda: nvml)


@pytest.mark.parametrize(
    ("listed", "present", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("0", 4, 1),
        ("0,1,2,3", 4, 4),
        ("3, 1", 4, 2),
        ("0,7,1", 4, 1),
        ("-1", 4, 0),
        ("0,-1,1", 4, 1),
        ("0,0", 4, 0),
        ("0,1", 0, 0),
        ("GPU-8a2e,GPU-77b1", 4, 2),
        ("MIG-1", 1, 1),
        ("nonsense", 4, 0),
    ],
)
def test_visible_devices_are_counted_by_cudas_rules(listed, present, count):
    assert visible(listed, present) == count


@pytest.mark.parametrize(
    ("parts", "environ", "count"),
    [
        ({"nvml": 8}, {}, 8),
        ({"nvml": 8}, {"CUDA_VISIBLE_DEVICES": "1,2"}, 2),
        ({"nvml": 8}, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"nvml": 0, "dev": ("nvidia0",)}, {}, 0),
        ({"dev": ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm")}, {}, 2),
        ({"simd": (0, 304, 304)}, {}, 2),
        ({"simd": (0, 304, 304)}, {"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"simd": (0, 304, 304)}, {"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({}, {}, 0),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
    ],
)
def test_gpus_are_found_by_library_then_device_files_then_kfd(tmp_path, parts, environ, count):
    assert gpu_count(environ, _machine(tmp_path, **parts)) == count


def test_auto_is_gpus_if_any_else_cores(tmp_path):
    machine = _machine(tmp_path, nvml=3)
    assert device_count("auto", {}, machine) == 3
    assert device_count("auto", {"CUDA_VISIBLE_DEVICES": ""}, machine) == cpu_count()


def test_cpu_is_the_cores_this_process_may_use():
    assert device_count("cpu", {}) == len(os.sched_getaffinity(0))


def test_xpu_counts_intels_render_nodes(tmp_path):
    machine = _machine(tmp_path, vendors=("0x8086", "0x10de", "0x8086"))
    assert device_count("xpu", {}, machine) == 2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("gpu", "no GPU is visible"),
        ("xpu", "no XPU is visible"),
        ("many", "neither a number of workers nor auto, cpu, gpu, xpu"),
    ],
)
def test_no_device_or_an_unknown_word_is_one_sentence(tmp_path, word, said):
    with pytest.raises(UsageError, match=said):
        device_count(word, {}, _machine(tmp_path))


def test_asking_the_management_library_never_fails():
    counted = nvml_count()
    assert counted is None or counted >= 0
