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
# fmt: off
SHARED = tuple(
    f"worker_hooks.{name}"
    for name in (
        "env", "protocol", "packet", "layout", "page", "manifest", "safetensor", "seal", "fault", "retention",
        "exit_file",
    )
)
# fmt: on
CONTROLLER = (
    "agent.state",
    "agent.events",
    "agent.actions",
    "agent.ranges",
    "agent.words",
    "agent.job",
    "agent.losses",
    "agent.restarts",
    "agent.stopping",
    "agent.dump_plan",
    "agent.dumping",
    "agent.patience",
    "agent.holding",
    "agent.rounds",
    "agent.replacing",
    "agent.draining",
    "agent.asked",
    "agent.controller",
)  # a staircase: each may import those before it
PURE = (
    *CONTROLLER,
    "agent.cause",
    "agent.report",
    "agent.rules",
    "agent.survival",
    "agent.ranks",
    "agent.spec",
    "agent.stay",
    "agent.room",
    "agent.hang",
    "agent.stragglers",
    "worker_hooks.env",
    "msrun.top_columns",
    "msrun.top_facts",
    "msrun.top_history",
    "msrun.top_keys",
    "msrun.top_view",
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


@pytest.mark.parametrize("module", ["msrun.cli", "agent.launch", "msrun.parse"])
def test_a_start_loads_nothing_heavy(module):
    if module not in FILES:
        pytest.skip(f"{module} is not there yet")
    assert loaded(f"import {module}") & HEAVY == set()


def test_the_supervisor_loads_no_torch():
    assert (
        loaded("import agent.supervisor, agent.failure, agent.status") & (HEAVY - {"asyncio"})
        == set()
    )


def test_the_hooks_import_in_a_bare_training_image():
    names = ", ".join(name for name in FILES if name.startswith("worker_hooks"))
    loaded_by_all = loaded(f"import {names}")
    assert loaded_by_all & {"agent", "msrun", "rich", "yaml", "click", "psutil"} == set()


def test_what_hooks_and_agent_share_needs_only_the_standard_library():
    assert loaded(f"import {', '.join(SHARED)}") & HEAVY == set()
    named = {top(each) for name in SHARED for each in imports(name)}
    assert named - {"worker_hooks", "__future__"} <= sys.stdlib_module_names


def test_the_agent_and_the_command_line_import_only_what_is_shared():
    others = {
        (name, each)
        for name in FILES
        if top(name) != "worker_hooks"
        for each in ours(name)
        if top(each) == "worker_hooks" and each not in {*SHARED, "worker_hooks"}
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
        "agent.starter",
        "agent.supervisor",
        "agent.store",
        "agent.links",
        "agent.teller",
    }


def test_only_what_is_forked_knows_torch():
    knowing = {name for name in FILES if any(top(each) == "torch" for each in imports(name))}
    assert {name for name in knowing if top(name) != "worker_hooks"} <= {"agent.warm.store"}


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
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_names_are_the_fields_words():
    forbidden = {"manager", "handler", "helper", "helpers", "utils", "util", "common", "base"}
    assert {name for name in FILES if set(name.replace("_", ".").split(".")) & forbidden} == set()
