"""What workers are told: torchrun's names, MindSpore's names, and the few rules between them."""

import pytest

from worker_hooks.contract.env import (
    JobEnv,
    RankEnv,
    WorkerEnv,
    sets_omp_threads,
    tft_features,
    visible_devices,
)

JOB = JobEnv(
    run_id="job7",
    world_size=8,
    local_world_size=4,
    group_rank=1,
    group_world_size=2,
    role="trainer",
    master_addr="10.0.0.1",
    master_port=29500,
    max_restarts=3,
    signals=("SIGTERM", "SIGINT"),
)
WORKER = WorkerEnv(rank=5, local_rank=1, restart_count=2, error_file="/logs/1.json")


def test_all_workers_of_a_job_are_told_alike():
    assert JOB.environ({}, "rec1") == {
        "MSRUN_AUDIT": "0.005",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "8",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "MSRUN_RUNS": "rec1",
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "8",
        "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "29500",
        "MS_NODE_RANK": "1",
        "RANK_SIZE": "8",
    }


def test_a_worker_is_told_who_it_is():
    assert WORKER.environ() == {
        "RANK": "5",
        "ROLE_RANK": "5",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/logs/1.json",
        "MS_NODE_ID": "5",
        "RANK_ID": "5",
        "DEVICE_ID": "1",
    }


def test_job_and_worker_say_different_things():
    assert JOB.environ({}, "rec1").keys() & WORKER.environ().keys() == set()


@pytest.mark.parametrize(
    ("name", "changes", "inherited", "told"),
    [
        ("RANK_TABLE_FILE", {}, {}, None),
        ("RANK_TABLE_FILE", {"rank_table_file": "/t.json"}, {}, "/t.json"),
        ("OMP_NUM_THREADS", {"local_world_size": 1}, {}, None),
        ("OMP_NUM_THREADS", {}, {"OMP_NUM_THREADS": "6"}, None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", {}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3"),
        ("MSRUN_RUNS", {}, {"MSRUN_RUNS": "outer"}, "outer:rec1"),
        ("MSRUN_RUNS", {}, {"MSRUN_RUNS": ""}, "rec1"),
        ("WORLD_SIZE", {}, {"WORLD_SIZE": "64"}, "8"),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", {"signals": ()}, {}, ""),
        ("MSRUN_JOB", {}, {}, None),
        ("MSRUN_JOB", {"job_id": "first"}, {}, "first"),
        ("MSRUN_JOB", {"job_id": "first"}, {"MSRUN_JOB": "outer"}, "first"),
        ("MSRUN_JOB", {}, {"MSRUN_JOB": "outer"}, ""),  # of the msrun that started this one
        ("GLOO_SOCKET_IFNAME", {}, {}, None),
        ("GLOO_SOCKET_IFNAME", {"interface": "eth1"}, {}, "eth1"),
        ("NCCL_SOCKET_IFNAME", {"interface": "eth1"}, {}, "eth1"),
        ("GLOO_SOCKET_IFNAME", {"interface": "eth1"}, {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
        ("NCCL_SOCKET_IFNAME", {"interface": "eth1"}, {"GLOO_SOCKET_IFNAME": "ib0"}, "eth1"),
    ],
)
def test_a_variable_follows_its_rule(name, changes, inherited, told):
    assert JOB._replace(**changes).environ(inherited, "rec1").get(name) == told


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"MSRUN_RUNS": "outer:rec1"}, "rec1"),
        ({"MSRUN_RUNS": "outer:rec1", "MSRUN_JOB": ""}, "rec1"),
        ({"MSRUN_RUNS": "outer:rec1", "MSRUN_JOB": "first"}, "first"),
    ],
)
def test_ranks_of_all_nodes_save_as_the_run_of_the_controllers_node(environ, job):
    assert RankEnv.read(environ).record_id == job


def test_with_a_virtual_local_rank_a_worker_sees_one_device_as_its_first():
    told = WORKER._replace(visible_device="GPU-a").environ()
    shown = {
        name: told[name] for name in ("LOCAL_RANK", "DEVICE_ID", "CUDA_VISIBLE_DEVICES", "RANK")
    }
    assert shown == {
        "LOCAL_RANK": "0",
        "DEVICE_ID": "0",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "RANK": "5",
    }


@pytest.mark.parametrize(
    ("nproc", "inherited", "exported"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"OMP_NUM_THREADS": ""}, False),
        (8, {"OMP_NUM_THREADS": "4"}, False),
    ],
)
def test_one_thread_a_worker_by_torchruns_rule(nproc, inherited, exported):
    assert sets_omp_threads(nproc, inherited) is exported


@pytest.mark.parametrize(
    ("nproc", "listed", "devices"),
    [
        (2, None, ("0", "1")),
        (2, "", ("0", "1")),
        (2, "3,5", ("3", "5")),
        (1, "3,5", ("3",)),
        (2, " GPU-a , MIG-b ,7", ("GPU-a", "MIG-b")),
    ],
)
def test_which_device_each_worker_sees(nproc, listed, devices):
    inherited = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_devices(nproc, inherited) == devices


def test_too_few_devices_are_named():
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=3,5 lists 2 for 3 workers"):
        visible_devices(3, {"CUDA_VISIBLE_DEVICES": "3,5"})


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("", {}),
        (" {} ", {}),
        ("{TTP:1}", {"TTP": True}),
        ("'{TTP:1,UCE:0}'", {"TTP": True, "UCE": False}),
        ('{ "ttp" : 0 , "Arf": true,}', {"TTP": False, "ARF": True}),
        ("\t{TTP:False}\n", {"TTP": False}),
    ],
)
def test_mindspore_s_switches_are_read_in_any_spelling(text, features):
    assert tft_features(text) == features


@pytest.mark.parametrize(
    "text",
    ["TTP:1", "{TTP}", "{TTP:2}", "{TTP=1}", "{:1}", "{TTP:1", "1", "{TTP:1;UCE:1}", "{,,}"],
)
def test_what_are_no_switches_is_refused(text):
    with pytest.raises(ValueError, match="must be like"):
        tft_features(text)
