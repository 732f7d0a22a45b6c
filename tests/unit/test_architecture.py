"""The walls between the packages, as three tables, and how much a start may load."""

import ast
import itertools
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAIRS = {  # a package may import those before it in its folder, and those of the folders above it
    "worker_hooks": "contract machine storage rng device distributed drill shadows tensors script changes state kept data guard recovery checkpoint callbacks training adapters",
    "agent": "forkserver text spec machine ranks controller seat nodes accounting records workers hooks rank_logs shadows launch arrivals health dump spread kept failure notify supervisor",
    "msrun": "options launchers cluster terminal runs report checkpoints job top doctor bugreport completion trials drill function",
}
DOORS = {  # the modules that other packages may import; of a package that is not listed: all
    "worker_hooks.rng": "generators randomness",
    "worker_hooks.distributed": "abort communicators cut_tensors ddp_reducers ddp_release kept_groups module_flags pipelines process_group rehearsal stacks store_connection",
    "worker_hooks.shadows": "cuts image page",
    "worker_hooks.state": "committed_state mismatch module private registry replication scaler snapshot",
    "worker_hooks.kept": "by_default state_mapper tensor_chain",
    "worker_hooks.changes": "observer",
    "worker_hooks.script": "containers for_loops growing kept library notice own source unregistered values watch",
    "worker_hooks.data": "feed feed_cache set_attributes unfed_loaders unkept_values",
    "worker_hooks.guard": "exit_hooks gate guard signal_wakeup",
    "worker_hooks.recovery": "agent_lost rejoin resume",
    "worker_hooks.checkpoint": "config context model_checkpoint save_plan",
    "worker_hooks.callbacks": "graceful_exit monitors on_request_exit protocol",
    "worker_hooks.training": "run train_state",
    "agent.forkserver": "",  # runs in a process of its own
    "agent.controller": "actions attempts decide drain events job messages protection replaceable replication restart_policy states",
    "agent.seat": "job_seat records rights tenure",
    "agent.launch": "certificates doors job_token meeting past prepare rank_plan recover_arg scheduler_watch signals succession team unprotected warm_imports",
    "agent.shadows": "shadows",
    "agent.health": "heartbeats monitor mute mute_controller signs_of_life step_times stopped unheard",
    "agent.dump": "beside draft executor flush memory node_copies room target",
    "agent.spread": "far_writes keeper node_writes sender",
    "agent.failure": "ending evidence evidence_json own_end post_mortem resume_advice",
    "agent.notify": "notice notifier",
    "agent.supervisor": "run",
    "msrun.checkpoints": "commands",
    "msrun.job": "detach dry_run request resume_point saving_ranks",
    "msrun.report": "report",
    "msrun.top": "watch",
    "msrun.bugreport": "command",
    "msrun.completion": "scripts words",
    "msrun.doctor": "command",
    "msrun.drill": "command",
    "msrun.function": "failure launch",
}
PURE = {  # packages and modules without effects
    *("agent.controller", "agent.accounting", "agent.ranks", "agent.text", "agent.spec"),
    *(
        "agent.failure.device_faults",
        "agent.failure.root_cause",
        "agent.failure.report",
        "agent.launch.rank_plan",
    ),
    *("agent.notify.notice", "agent.notify.metrics"),
    *("agent.nodes.codec", "agent.nodes.frames", "agent.nodes.messages", "agent.nodes.roster"),
    "agent.nodes.vocabulary",
    *("agent.seat.records", "agent.seat.rights"),
    "agent.shadows.cut_board",
    *("agent.nodes.alike", "agent.arrivals.places", "agent.arrivals.resize", "agent.launch.search"),
    *("agent.arrivals.leaving", "agent.arrivals.successors"),
    *("agent.health.hang", "agent.health.stall", "agent.health.stragglers"),
    *(
        "worker_hooks.contract.env",
        "worker_hooks.contract.fingerprint",
        "worker_hooks.contract.peer_lost",
        "worker_hooks.contract.rank_lines",
        "worker_hooks.contract.protocol",
    ),
    *("msrun.top.columns", "msrun.top.facts", "msrun.top.history", "msrun.top.view"),
    "msrun.top.keys",
    *("msrun.report.lanes", "msrun.report.markup", "msrun.report.pace", "msrun.report.timeline"),
    *("msrun.report.pictures", "msrun.report.style", "msrun.report.whole_restarts"),
}

EXTRAS = {  # modules that need more than msrun's own dependencies; who has it imports them by name
    "worker_hooks.adapters.accelerate": "accelerate",
    "worker_hooks.adapters.hf": "transformers",
    "worker_hooks.adapters.lightning": "lightning",
}

EFFECTS = {"os", "time", "random", "socket", "asyncio", "subprocess", "threading"}
HEAVY = {"torch", "numpy", "rich", "yaml", "click", "asyncio", "psutil"}
SHARED = (
    "worker_hooks.contract",
    "worker_hooks.machine",
    "worker_hooks.storage",
    "worker_hooks.drill.plan",
    "worker_hooks.distributed.ddp_release",
    "worker_hooks.distributed.rehearsal",
    "worker_hooks.shadows",
)
ENTRY_POINTS = {"__init__.py", "__main__.py", "cli.py", "commands.py", "py.typed"}
ASYNCIO = {
    "agent.arrivals",
    "agent.nodes",
    "agent.workers",
    "agent.hooks",
    "agent.shadows",
    "agent.supervisor",
}
MOST_LINES = 600  # of a file
MOST_FILES = 16  # of a package


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CATALOGUE = ROOT / "msrun/drill/catalogue"  # scripts that are run, not imported
FILES = {
    name_of(path): path
    for each in STAIRS
    for path in sorted((ROOT / each).rglob("*.py"))
    if path.parent != CATALOGUE
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}
LEVELS = [
    ".".join((folder, *package))
    for folder, packages in STAIRS.items()
    for package in (*([each] for each in packages.split()), [])  # last the folder's entry points
]


def package_of(module):
    return module if module in PACKAGES else module.rpartition(".")[0]


def is_pure(module):
    return module in PURE or package_of(module) in PURE


def top(module):
    return module.split(".")[0]


@cache
def tree(module):
    return ast.parse(FILES[module].read_text())


@cache
def imports(module):
    """Every dotted name that a file imports, anywhere in it, types alone and inside functions, too."""
    found = set()
    for node in ast.walk(tree(module)):
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


@cache  # seconds, which each process would take that collects tests
def arrows():
    return [(module, other) for module in FILES for other in sorted(ours(module))]


def loaded(statement):
    """Top-level packages in a fresh interpreter after a statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


def test_stairs_name_every_package_and_no_other():
    assert set(LEVELS) == PACKAGES


def test_stairs_no_package_imports_one_after_it():
    upward = [
        (module, other)
        for module, other in arrows()
        if LEVELS.index(package_of(module)) < LEVELS.index(package_of(other))
    ]
    assert upward == []


def test_doors_no_package_is_entered_elsewhere():
    entered = {
        (other, module) for module, other in arrows() if package_of(module) != package_of(other)
    }
    doors = {f"{package}.{module}" for package in DOORS for module in DOORS[package].split()}
    assert {
        pair for pair in entered if package_of(pair[0]) in DOORS and pair[0] not in doors
    } == set()
    assert doors - {other for other, _ in entered} == set(), "nobody uses these doors: shut them"


def test_pure_modules_have_no_effects():
    assert FILES.keys() >= PURE
    effects = {
        name: {top(each) for each in imports(name)} & EFFECTS for name in filter(is_pure, FILES)
    }
    assert {name: found for name, found in effects.items() if found} == {}


def test_all_that_the_controller_reaches_is_pure():
    reached = {name for name in FILES if package_of(name) == "agent.controller"}
    while more := {other for name in reached for other in ours(name)} - reached:
        reached |= more
    assert set(itertools.filterfalse(is_pure, reached)) == set()


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


def test_the_agent_and_the_command_line_import_only_what_is_shared():
    assert [
        (module, other)
        for module, other in arrows()
        if top(module) != "worker_hooks" == top(other) and not other.startswith(SHARED)
    ] == [("msrun", "worker_hooks")]  # the public names, handed on


def test_no_private_name_is_imported_from_another_module():
    private = {
        name for module in FILES for name in imports(module) if top(name) in STAIRS and "._" in name
    }
    assert {name for name in private if not name.endswith("__")} == set()


def test_asyncio_stays_in_the_packages_around_the_one_loop():
    assert {package_of(name) for name in FILES if "asyncio" in imports(name)} <= ASYNCIO


def test_only_the_hooks_and_what_is_forked_import_torch():
    importers = {name for name in FILES if any(top(each) == "torch" for each in imports(name))}
    outside = {name for name in importers if top(name) != "worker_hooks"}
    assert outside <= {"agent.forkserver.store_host"}


@pytest.mark.parametrize("module", ["msrun.cli", "agent.launch.prepare", "msrun.job.request"])
def test_a_start_loads_nothing_heavy(module):
    assert loaded(f"import {module}") & HEAVY == set()


def test_the_supervisor_loads_no_torch():
    modules = "agent.supervisor.supervisor, agent.failure.post_mortem, agent.supervisor.status"
    assert loaded(f"import {modules}") & (HEAVY - {"asyncio"}) == set()


def test_the_hooks_import_in_a_bare_training_image():
    names = ", ".join(name for name in FILES if top(name) == "worker_hooks" and name not in EXTRAS)
    loaded_by_all = loaded(f"import {names}")
    assert loaded_by_all & {"agent", "msrun", "rich", "yaml", "click", "psutil"} == set()


def test_a_framework_is_imported_by_its_adapter_alone():
    frameworks = {*EXTRAS.values()}
    found = {name: {top(each) for each in imports(name)} & frameworks for name in FILES}
    assert {name: each for name, each in found.items() if each} == {
        name: {package} for name, package in EXTRAS.items()
    }
    assert {module for module, other in arrows() if other in EXTRAS} <= EXTRAS.keys()


def test_what_hooks_and_agent_share_needs_only_the_standard_library():
    shared = [name for name in FILES if name.startswith(SHARED)]
    assert loaded(f"import {', '.join(shared)}") & HEAVY == set()
    named = {top(each) for name in shared for each in imports(name)}
    assert named - {"worker_hooks", "__future__"} <= sys.stdlib_module_names


def test_a_folder_shows_its_packages_only():
    files = {path.name for folder in STAIRS for path in (ROOT / folder).iterdir() if path.is_file()}
    assert files <= ENTRY_POINTS


def test_a_package_loads_nothing_by_itself():
    lazy = {"worker_hooks", "msrun"}  # they look public names up on demand
    assert {name for name in PACKAGES - lazy if len(tree(name).body) > 1} == set()


def test_a_package_fits_one_look():
    modules = defaultdict(set)
    for name in FILES.keys() - PACKAGES:
        modules[package_of(name)].add(name)
    assert {package: len(of) for package, of in modules.items() if len(of) > MOST_FILES} == {}


def test_every_file_fits_a_reader():
    paths = [*FILES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_class_name_means_one_class():
    homes = defaultdict(list)
    for name in FILES:
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {each: found for each, found in homes.items() if len(found) > 1} == {}


def test_module_names_are_the_fields_words():
    forbidden = {"manager", "handler", "helper", "helpers", "utils", "util", "common", "base"}
    assert {name for name in FILES if set(name.replace("_", ".").split(".")) & forbidden} == set()
