"""Trains under NVRx's launcher and sends it a heartbeat after each step, including the first."""

import os

import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from rollback import train
from training import RANK, WORLD, Steps, arguments

options = arguments()
monitor = RankMonitorClient()
monitor.init_workload_monitoring()
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
train(options, RANK, WORLD, Steps(options), attempt, beat=monitor.send_heartbeat)
