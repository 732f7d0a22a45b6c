"""Tells what it was started with, in `told.jsonl` of its folder, and leaves as `$LEAVE` says."""

import json
import os
import sys

told = {
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "environ": {name: os.environ.get(name) for name in ("MODE", "RANK", "API_TOKEN")},
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "world": os.environ["WORLD_SIZE"],
    "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
}
with open("told.jsonl", "a") as file:
    file.write(json.dumps(told) + "\n")
sys.exit(int(os.environ.get("LEAVE", "0")))
