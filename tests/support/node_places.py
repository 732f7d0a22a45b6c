"""What the ranks of a job on several nodes tell of their places, compared with what they have to be."""

from __future__ import annotations

import itertools
import json

from support.jobs import WORKERS, Ended
from support.node_jobs import NodesJob

PLACE = WORKERS / "place.py"
OPEN = "msrun: the nodes have no token: whoever reaches port "


def places(job: NodesJob) -> list[dict]:
    """What the ranks told of themselves, by rank, once all have told it."""
    job.await_everywhere("\n")
    found = {}
    for name, log in job.logs().items():
        (line,) = [line for line in log.splitlines() if line.startswith("place ")]
        told = json.loads(line.removeprefix("place "))
        assert name == f"worker_{told['RANK']}.log"
        found[int(told["RANK"])] = told
    assert sorted(found) == list(range(len(found)))
    return [found[rank] for rank in range(len(found))]


def hosts(job: NodesJob) -> list[str]:
    return [place["host"] for place in places(job)]


def check_places(job: NodesJob, sizes: list[int], names: list[str]) -> None:
    """Every variable of each rank, for nodes of so many ranks with these names."""
    told, world = places(job), sum(sizes)
    expected = itertools.chain.from_iterable(
        [(node, local) for local in range(size)] for node, size in enumerate(sizes)
    )
    for rank, (node, local) in enumerate(expected):
        about = told[rank]
        want = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": sizes[node],
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(sizes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        assert {name: about[name] for name in want} == {k: str(v) for k, v in want.items()}
        assert about["host"] == names[node]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"):
        assert len({one[name] for one in told} - {None}) == 1


def quiet(ended: list[Ended]) -> None:
    """Nothing was said but who the nodes are."""
    for each in ended:
        lines = [line for line in each.err.splitlines() if not line.startswith(OPEN)]
        assert all("waiting " in line or "this is node" in line for line in lines), each.err
