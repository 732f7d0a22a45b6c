"""Warm or cold, and why: tiny sources, parsed and never run."""

import sys
import warnings

import pytest

from agent.launch import warm_imports
from agent.launch.warm_imports import choose
from agent.spec.job_spec import BindSpec, JobSpec, Program, ProgramKind, StartMethod

ARGV = ("python", "-u", "train.py")
DYNAMO = "torch._dynamo"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(folder, sources, environ=None, name="train.py", kind=ProgramKind.SCRIPT, **changes):
    """The choice for a job whose files are ``sources``; a lone string is ``train.py``."""
    files = {"train.py": sources} if isinstance(sources, str) else sources
    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(source)
    warm_imports.look.cache_clear()
    program = Program(name, (), kind, changes.pop("interpreter", sys.executable))
    job = JobSpec(program=program, nproc=2, run_id="job", record_id="rec", **changes)
    return choose(job, ARGV, environ or {})


def modules(choice):
    return set(choice.warmth.preload)


WARM = [  # name, sources, preloaded, later
    ("import torch", "import torch", {"torch"}, (DYNAMO,)),
    ("a part of torch", "import torch.distributed as dist", {"torch", "torch.distributed"}, (DYNAMO,)),
    ("a part by from", "from torch.nn.parallel import DistributedDataParallel", {"torch", "torch.nn.parallel", "torch.nn.parallel.DistributedDataParallel"}, (DYNAMO,)),
    ("from torch import optim", "from torch import optim", {"torch", "torch.optim", DYNAMO}, ()),
    ("an optimizer's module", "import torch.optim.adamw", {"torch", "torch.optim.adamw", DYNAMO}, ()),
    ("an optimizer by attribute", "import torch\ntorch.optim.SGD", {"torch", DYNAMO}, ()),
    ("torch.compile called", "import torch\nmodel = torch.compile(model)", {"torch", DYNAMO}, ()),
    ("torch.compile as a decorator", "import torch\n@torch.compile\ndef f(): ...", {"torch", DYNAMO}, ()),
    ("inside a function", "def main():\n    import torch\n", {"torch"}, (DYNAMO,)),
    ("inside try", "try:\n    import torch\nexcept ImportError:\n    raise", {"torch"}, (DYNAMO,)),
    ("through a library", "import torchvision", {"torch"}, (DYNAMO,)),
    ("through a library's part", "from lightning.pytorch import Trainer", {"torch"}, (DYNAMO,)),
    ("through a local module", {"train.py": "import net", "net.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("through two", {"train.py": "import a", "a.py": "import b", "b.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("through a package", {"train.py": "import pkg", "pkg/__init__.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("through a package's module", {"train.py": "from pkg import net", "pkg/__init__.py": "", "pkg/net.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("through a folder without __init__", {"train.py": "import pkg.net", "pkg/net.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("relatively inside a package", {"train.py": "import pkg", "pkg/__init__.py": "from . import net", "pkg/net.py": "import torch"}, {"torch"}, (DYNAMO,)),
    ("local modules that import each other", {"train.py": "import a", "a.py": "import b, torch", "b.py": "import a"}, {"torch"}, (DYNAMO,)),
    ("the optimizer in a local module", {"train.py": "import torch, steps", "steps.py": "from torch.optim import Adam"}, {"torch", "torch.optim", "torch.optim.Adam", DYNAMO}, ()),
    ("a variable that is read later", "import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch", {"torch"}, (DYNAMO,)),
    ("a variable of the script's own", "import os\nos.environ['SEED'] = '1'\nimport torch", {"torch"}, (DYNAMO,)),
    ("a variable that is only read", "import os\nos.environ['OMP_NUM_THREADS']\nimport torch", {"torch"}, (DYNAMO,)),
    ("a coding cookie", "# -*- coding: latin-1 -*-\nimport torch", {"torch"}, (DYNAMO,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "early", "later"), [row[1:] for row in WARM], ids=[row[0] for row in WARM]
)
def test_what_is_imported_before_the_fork_and_what_after_it(folder, sources, early, later):
    choice = chosen(folder, sources)
    assert modules(choice) == early
    assert choice.warmth.later == later
    assert choice.reason.startswith("imports torch")


@pytest.mark.parametrize(
    "names",
    [
        "from worker_hooks import TrainState, run",
        "from msrun import TrainState, run",
        "import msrun",
    ],
)
def test_the_hooks_are_preloaded_for_a_script_that_imports_them(folder, names):
    sources = f"import torch\n{names}\n"
    assert warm_imports.HOOKS_ENTRY in modules(chosen(folder, sources))


@pytest.mark.parametrize("own", ["msrun.py", "msrun/__init__.py", "worker_hooks.py"])
def test_a_module_of_such_a_name_beside_the_script_is_the_scripts(folder, own):
    files = {"train.py": "import torch\nfrom msrun import TrainState", own: "TrainState = object"}
    assert warm_imports.HOOKS_ENTRY not in modules(chosen(folder, files))


def test_a_folder_called_msrun_does_not_hide_the_hooks(folder):
    (folder / "msrun").mkdir()  # logs, perhaps
    sources = "import torch\nfrom msrun import TrainState"
    assert warm_imports.HOOKS_ENTRY in modules(chosen(folder, sources))


COLD = [  # name, sources, reason
    ("no torch", "import json", "does not import torch"),
    ("another module with torch in its name", "import torchless", "does not import torch"),
    ("torch in words alone", "'import torch'  # import torch", "does not import torch"),
    ("an empty file", "", "does not import torch"),
    ("a syntax error", "import torch\ndef", "does not import torch"),
    ("a null byte", "import torch\0", "does not import torch"),
    ("an endless expression", "import torch\nx = " + "-" * 100_000 + "1", "does not import torch"),
    ("a huge file", "import torch\n#" + "x" * warm_imports.MAX_BYTES, "does not import torch"),
    ("a module elsewhere", {"train.py": "import lib.net", "other/net.py": "import torch"}, "does not import torch"),
    ("threads by environ", "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "sets OMP_NUM_THREADS"),
    ("threads by setdefault", "import os\nos.environ.setdefault('MKL_NUM_THREADS', '4')\nimport torch", "sets MKL_NUM_THREADS"),
    ("threads by update", "import os\nos.environ.update({'A': '1', 'KMP_AFFINITY': 'x'})\nimport torch", "sets KMP_AFFINITY"),
    ("threads by update's keywords", "import os\nos.environ.update(OMP_NUM_THREADS='x')\nimport torch", "sets OMP_NUM_THREADS"),
    ("threads by putenv", "import os\nos.putenv('GOMP_SPINCOUNT', '0')\nimport torch", "sets GOMP_SPINCOUNT"),
    ("from os import environ", "from os import environ\nenviron['OPENBLAS_NUM_THREADS'] = '1'\nimport torch", "sets OPENBLAS_NUM_THREADS"),
    ("torch's own", "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\nimport torch", "sets TORCH_LOGS"),
    ("in a local module", {"train.py": "import early, torch", "early.py": "import os\nos.environ['OMP_NUM_THREADS'] = '1'"}, "sets OMP_NUM_THREADS"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "reason"), [row[1:] for row in COLD], ids=[row[0] for row in COLD]
)
def test_when_in_doubt_a_fresh_interpreter(folder, sources, reason):
    choice = chosen(folder, sources)
    assert choice.warmth is None
    assert reason in choice.reason


TORCH = "import torch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start_method": StartMethod.SPAWN}, "--start-method spawn"),
        ({"start_method": StartMethod.SPAWN, "preload": ("json",)}, "--start-method spawn"),
        ({"kind": ProgramKind.PROGRAM}, "not a Python script or module"),
        ({"kind": ProgramKind.RUN_PATH}, "not a Python script or module"),
        ({"interpreter": "/opt/python"}, "the workers' interpreter is /opt/python"),
        ({"name": "missing", "kind": ProgramKind.MODULE}, "no Python source was found for missing"),
        ({"bind": BindSpec(auto=True), "environ": {}, "nproc": 1}, "with bound cores"),
    ],
)
def test_a_job_that_cannot_be_warm(folder, changes, reason):
    nproc = changes.pop("nproc", 2)
    environ = changes.pop("environ", {})
    (folder / "train.py").write_text(TORCH)
    program = Program(
        changes.pop("name", "train.py"),
        (),
        changes.pop("kind", ProgramKind.SCRIPT),
        changes.pop("interpreter", sys.executable),
    )
    job = JobSpec(program=program, nproc=nproc, run_id="job", record_id="rec", **changes)
    choice = choose(job, ARGV, environ)
    assert choice.warmth is None
    assert reason in choice.reason


@pytest.mark.parametrize("environ", [{}, {"OMP_NUM_THREADS": "2"}])
def test_bound_cores_may_be_warm_where_the_thread_count_is_given(folder, environ):
    assert chosen(folder, TORCH, environ, bind=BindSpec(auto=True)).warmth is not None


def test_a_missing_script_is_left_to_python(folder):
    assert chosen(folder, {}).warmth is None


def test_modules_the_user_names_are_preloaded_beside(folder):
    assert modules(chosen(folder, TORCH, preload=("numpy", "my.lib"))) == {
        "torch",
        "numpy",
        "my.lib",
    }


def test_modules_the_user_names_make_any_script_warm(folder):
    choice = chosen(folder, "print()", preload=("numpy",))
    assert (choice.warmth.preload, choice.warmth.later) == (("numpy",), ())


def test_the_user_may_overrule_an_early_variable(folder):
    sources = "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch"
    assert "torch" in modules(chosen(folder, sources, preload=("numpy",)))


def test_the_worker_command_line_is_passed_on(folder):
    warmth = chosen(folder, TORCH).warmth
    assert (warmth.argv, warmth.search_path) == (ARGV, str(folder))


def test_a_script_behind_a_link_finds_its_modules_where_it_really_is(folder):
    files = {"real/train.py": "import net", "real/net.py": TORCH}
    (folder / "link.py").symlink_to(folder / "real/train.py")
    warmth = chosen(folder, files, name="link.py").warmth
    assert warmth.search_path == str(folder / "real")


def test_a_folder_is_run_by_its_main(folder):
    warmth = chosen(folder, {"app/__main__.py": TORCH}, name="app").warmth
    assert warmth.search_path == str(folder / "app")


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("train", {"train.py": TORCH}),
        ("pkg.train", {"pkg/train.py": TORCH}),
        ("pkg", {"pkg/__init__.py": "", "pkg/__main__.py": TORCH}),
        (
            "pkg.train",
            {"pkg/__init__.py": "", "pkg/train.py": "from .net import Net", "pkg/net.py": TORCH},
        ),
        (
            "pkg.train",
            {"pkg/__init__.py": "", "pkg/train.py": "from . import net", "pkg/net.py": TORCH},
        ),
        ("pkg.sub.train", {"pkg/sub/train.py": "from ..net import Net", "pkg/net.py": TORCH}),
        ("pkg.train", {"pkg/train.py": "from pkg.net import Net", "pkg/net.py": TORCH}),
    ],
)
def test_a_module_is_looked_at_where_python_finds_it(folder, name, sources):
    warmth = chosen(folder, sources, name=name, kind=ProgramKind.MODULE).warmth
    assert "torch" in warmth.preload
    assert warmth.search_path == str(folder)


def test_a_large_program_is_looked_at_only_so_far(folder, monkeypatch):
    monkeypatch.setattr(warm_imports, "MAX_FILES", 3)
    chain = {f"m{i}.py": f"import m{i + 1}" for i in range(9)}
    found = chosen(folder, {"train.py": "import m0", **chain, "m9.py": TORCH})
    assert found.warmth is None


def test_the_debug_level_is_read_at_import(folder):
    sources = "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\nimport torch"
    assert chosen(folder, sources).warmth is None


EARLY = "import os\nos.environ['OMP_NUM_THREADS'] = '4'"


def test_a_modules_packages_are_looked_at(folder):
    files = {"pkg/__init__.py": EARLY, "pkg/train.py": TORCH}
    assert chosen(folder, files, name="pkg.train", kind=ProgramKind.MODULE).warmth is None


@pytest.mark.parametrize(
    "early",
    [
        "del os.environ['OMP_NUM_THREADS']",
        "os.environ.pop('OMP_NUM_THREADS', None)",
        "os.environ |= {'OMP_NUM_THREADS': '4'}",
        "os.environ.update(dict(OMP_NUM_THREADS='4'))",
        "os.unsetenv('OMP_NUM_THREADS')",
    ],
)
def test_every_way_to_change_a_variable_is_seen(folder, early):
    assert chosen(folder, f"import os\n{early}\nimport torch").warmth is None


def test_a_scripts_warnings_are_left_to_its_workers(folder):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert chosen(folder, "import torch\npattern = '\\d'").warmth is not None
    assert seen == []
