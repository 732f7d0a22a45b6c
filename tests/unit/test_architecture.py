"""Who may import whom, and how much a start may load: the house's walls."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"worker_hooks": 0, "agent": 1, "msrun": 2}
HEAVY = {"torch", "numpy", "rich", "yaml", "click", "asyncio", "psutil"}
EFFECTS = {"os", "time", "random", "socket", "asyncio", "subprocess", "threading"}
SHARED = ("worker_hooks.contract", "worker_hooks.storage", "worker_hooks.drill.plan")
CONTROLLER = (
    "agent.spec.exit_budget",
    "agent.spec.job_spec",
    "agent.controller.states",
    "agent.controller.events",
    "agent.controller.actions",
    "agent.text.ranges",
    "agent.text.wording",
    "agent.controller.job",
    "agent.controller.replaceable",
    "agent.controller.restart_policy",
    "agent.controller.attempts",
    "agent.controller.dump_steps",
    "agent.controller.dump",
    "agent.controller.graceful_exit",
    "agent.controller.replacement_rounds",
    "agent.controller.replacement",
    "agent.controller.drain",
    "agent.controller.stop_requests",
    "agent.controller.decide",
)  # a staircase: each may import those before it
PURE = (
    *CONTROLLER,
    "agent.failure.root_cause",
    "agent.failure.report",
    "agent.launch.rank_plan",
    "agent.spec.job_spec",
    "agent.health.stall",
    "agent.health.hang",
    "agent.health.stragglers",
    "worker_hooks.contract.env",
    "msrun.top.columns",
    "msrun.top.facts",
    "msrun.top.history",
    "msrun.top.keys",
    "msrun.top.view",
)


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}


def top(module):
    return module.split(".")[0]


@cache
def imports(module):
    """Every dotted name that a file imports, anywhere in it, types alone and inside functions, too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def ours(module):
    """Our files that a file imports; `from agent import x` means agent.x, not all of agent."""
    named = imports(module) & FILES.keys()
    deeper = {name.rpartition(".")[0] for name in named}
    return named - deeper - {module}


def loaded(statement):
    """Top-level packages in a fresh interpreter after a statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["msrun.cli", "agent.launch.prepare", "msrun.launch.request"])
def test_a_start_loads_nothing_heavy(module):
    if module not in FILES:
        pytest.skip(f"{module} is not there yet")
    assert loaded(f"import {module}") & HEAVY == set()


def test_the_supervisor_loads_no_torch():
    assert (
        loaded(
            "import agent.supervisor.supervisor, agent.failure.post_mortem, agent.supervisor.status"
        )
        & (HEAVY - {"asyncio"})
        == set()
    )


def test_the_hooks_import_in_a_bare_training_image():
    names = ", ".join(name for name in FILES if name.startswith("worker_hooks"))
    loaded_by_all = loaded(f"import {names}")
    assert loaded_by_all & {"agent", "msrun", "rich", "yaml", "click", "psutil"} == set()


def test_what_hooks_and_agent_share_needs_only_the_standard_library():
    shared = [name for name in FILES if name.startswith(SHARED)]
    assert loaded(f"import {', '.join(shared)}") & HEAVY == set()
    named = {top(each) for name in shared for each in imports(name)}
    assert named - {"worker_hooks", "__future__"} <= sys.stdlib_module_names


def test_the_agent_and_the_command_line_import_only_what_is_shared():
    others = {
        (name, each)
        for name in FILES
        if top(name) != "worker_hooks"
        for each in ours(name)
        if top(each) == "worker_hooks" and not (each == "worker_hooks" or each.startswith(SHARED))
    }
    assert others == set()


@pytest.mark.parametrize("module", PURE)
def test_a_pure_room_imports_no_effect(module):
    assert {top(each) for each in imports(module)} & EFFECTS == set()


@pytest.mark.parametrize("module", CONTROLLER)
def test_what_the_controller_imports_is_pure_itself(module):
    assert ours(module) <= set(CONTROLLER[: CONTROLLER.index(module)])


def test_only_the_supervisors_rooms_know_asyncio():
    assert {name for name in FILES if "asyncio" in imports(name)} <= {
        "agent.workers.starter",
        "agent.supervisor.supervisor",
        "agent.workers.store_client",
        "agent.hooks.rank_links",
        "agent.supervisor.status",
    }


def test_only_what_is_forked_knows_torch():
    knowing = {name for name in FILES if any(top(each) == "torch" for each in imports(name))}
    assert {name for name in knowing if top(name) != "worker_hooks"} <= {
        "agent.forkserver.store_host"
    }


def test_no_import_goes_upstairs():
    upward = [
        (name, other)
        for name in FILES
        for other in imports(name)
        if FLOORS.get(top(other), 0) > FLOORS[top(name)]
    ]
    assert upward == []


def test_no_imports_go_in_circles():
    done = set()

    def visit(module, path):
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in ours(module):
                visit(other, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def test_every_file_fits_a_reader():
    tests = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "scripts").rglob("*.py"))
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (*FILES.values(), *tests)
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert long == {}


def test_names_are_the_fields_words():
    forbidden = {"manager", "handler", "helper", "helpers", "utils", "util", "common", "base"}
    assert {name for name in FILES if set(name.replace("_", ".").split(".")) & forbidden} == set()
