"""Finds what a script will import by parsing it and its local modules, never by running them.

The rule of a warm start: nothing is preloaded that the script would not import itself, and nothing
whose import the script prepares (by setting an environment variable that is read at import). When
in doubt, a fresh interpreter is used.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import JobSpec, Program, ProgramKind, StartMethod
from agent.workers.forkserver_client import WarmStart
from worker_hooks.contract.env import sets_omp_threads

MAX_FILES = 300  # local modules looked at
MAX_BYTES = 2_000_000  # of one file
DYNAMO = "torch._dynamo"  # imported by the first optimizer or torch.compile; 0.9-1.5 s
HOOKS = ("worker_hooks", "msrun")  # a script imports the hooks under either name
HOOKS_ENTRY = "worker_hooks.training.run"  # imports everything that those names are looked up in
OPTIMIZERS = ("torch.optim", "torch.compile")
RECOVER = "is_recover"  # MindSpore's name of a script's argument: it resumes

# Set before `import torch`, these change what the import does; all others are read later.
READ_AT_IMPORT = (
    "OMP",
    "MKL",
    "KMP",
    "GOMP",
    "OPENBLAS",
    "TORCH",
    "PYTORCH",
    "ATEN",
    "LD_",
    "PYTHON",
)
READ_LATER = ("TORCH_NCCL", "TORCHELASTIC")
LOOKS = frozenset({"get", "copy", "items", "keys", "values"})  # methods that change nothing

# These import torch themselves; a script that uses them may never name torch.
TORCH_USERS = frozenset(
    {
        "accelerate",
        "deepspeed",
        "lightning",
        "pytorch_lightning",
        "torchvision",
        "torchaudio",
        "timm",
    }
)


# Packages that train nothing, or not with our hooks.
HOOKS_FREE = frozenset(
    {
        *("torch", "numpy", "scipy", "pandas", "sklearn", "PIL", "cv2", "matplotlib", "tqdm"),
        *("transformers", "datasets", "tokenizers", "sentencepiece", "tiktoken", "einops", "peft"),
        *("wandb", "tensorboard", "tensorboardX", "mlflow", "hydra", "omegaconf", "yaml", "click"),
        *("rich", "psutil", "safetensors", "requests", "packaging", "torchmetrics", "evaluate"),
    }
)


class Findings:
    """What the sources contain."""

    def __init__(self) -> None:
        self.modules: set[str] = set()  # dotted names that are imported
        self.names: set[str] = set()  # dotted names that are used
        self.early_environ: str | None = None  # a variable set that an import reads
        self.names_recover = False  # ``is_recover`` is an argument or a value of the sources
        self.files = 0


class Choice(NamedTuple):
    """Warm or cold, with the reason as text."""

    warmth: WarmStart | None
    reason: str


def choose(spec: JobSpec, argv: tuple[str, ...], environ: Mapping[str, str]) -> Choice:
    """Decide how this job's workers start."""
    program = spec.program
    if spec.start_method is StartMethod.SPAWN:
        return Choice(None, "--start-method spawn")
    if program.kind not in {ProgramKind.SCRIPT, ProgramKind.MODULE}:
        return Choice(None, "the program is not a Python script or module")
    if program.interpreter != sys.executable:
        return Choice(None, f"the workers' interpreter is {program.interpreter}")
    if "$" in program.name:
        return Choice(None, "each rank has a script of its own")
    if spec.bind.wanted and not (
        "OMP_NUM_THREADS" in environ or sets_omp_threads(spec.local_world_size, environ)
    ):
        return Choice(None, "with bound cores the thread count is read at import")
    source = entry(program)
    if source is None:
        return Choice(None, f"no Python source was found for {program.name}")
    search_path = str(search_path_of(program, source))
    found = look(source, Path(search_path))
    wanted = tuple(spec.preload)
    if not wanted and not _imports_torch(found):
        return Choice(None, "the script does not import torch")
    if found.early_environ is not None and not wanted:
        return Choice(None, f"the script sets {found.early_environ}, which torch reads at import")
    modules = _torch_modules(found, Path(search_path))
    optimizes = any(name.startswith(OPTIMIZERS) for name in found.modules | found.names)
    later = (DYNAMO,) if modules and not optimizes else ()
    if modules and optimizes:
        modules = (*modules, DYNAMO)
    warmth = WarmStart(argv, (*modules, *wanted), later, search_path)
    return Choice(warmth, "imports " + ", ".join(warmth.preload))


def is_python_of_ours(spec: JobSpec) -> bool:
    """Whether the workers run the interpreter that runs msrun."""
    program = spec.program
    return program.kind is not ProgramKind.PROGRAM and program.interpreter == sys.executable


def entry(program: Program) -> Path | None:
    """The source file that will be ``__main__``; ``None``: it is not Python, or not found."""
    name = program.name
    if program.kind is ProgramKind.PROGRAM:
        return None
    if program.kind is not ProgramKind.MODULE:
        path = Path(os.path.realpath(name))
        return path / "__main__.py" if path.is_dir() else path
    for folder in (os.getcwd(), *sys.path):
        base = Path(folder, *name.split("."))
        for path in (base.parent / f"{base.name}.py", base / "__main__.py"):
            if path.is_file():
                return path
    return None


def search_path_of(program: Program, source: Path) -> Path:
    """The folder that will be ``sys.path[0]``."""
    return source.parent if program.kind is ProgramKind.SCRIPT else Path.cwd()


def uses_torch_unprotected(found: Findings, search_path: Path) -> bool:
    """Whether all sources could be read, use torch, and never import our hooks.

    A package that is neither known nor beside the script may train with our hooks itself.
    """
    is_all = 0 < found.files < MAX_FILES and not any(
        _may_train(top, search_path) for top in {_top(module) for module in found.modules}
    )
    return is_all and _imports_torch(found) and not _imports_hooks(found, search_path)


def _may_train(top: str, search_path: Path) -> bool:
    """Whether a package is one of whose sources nothing is known; ``top`` is empty: relative."""
    is_known = not top or top in sys.stdlib_module_names or top in HOOKS_FREE | TORCH_USERS
    return not is_known and not any(
        (search_path / each).exists() for each in (f"{top}.py", f"{top}/__init__.py", top)
    )


def _imports_torch(found: Findings) -> bool:
    tops = {_top(module) for module in found.modules}
    return "torch" in tops or bool(tops & TORCH_USERS)


def _top(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def _torch_modules(found: Findings, search_path: Path) -> tuple[str, ...]:
    if not _imports_torch(found):
        return ()
    named = {module for module in found.modules if module.startswith("torch.")}
    hooks = (HOOKS_ENTRY,) if _imports_hooks(found, search_path) else ()
    return ("torch", *sorted(named), *hooks)


def _imports_hooks(found: Findings, search_path: Path) -> bool:
    """Whether the script imports our hooks.

    A package of such a name beside the script is the script's own, and only the script may import
    that; ``msrun`` looks its names up in whatever ``worker_hooks`` the script would find.
    """

    def is_ours(name: str) -> bool:
        files = (f"{name}.py", f"{name}/__init__.py")  # a mere folder hides no installed package
        return not any((search_path / each).is_file() for each in files)

    imported = {_top(module) for module in found.modules}
    return is_ours("worker_hooks") and any(name in imported and is_ours(name) for name in HOOKS)


@lru_cache(maxsize=1)  # a launch asks twice: how to start the script, and what to tell it
def look(entry: Path, search_path: Path) -> Findings:
    """Walk ``entry`` and the local modules it imports."""
    found = Findings()
    seen: set[Path] = set()
    # `-m pkg.train` imports pkg first
    queue = [entry, *(folder / "__init__.py" for folder in _packages(entry, search_path))]
    while queue and found.files < MAX_FILES:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        tree = _parse(path)
        if tree is None:
            continue
        found.files += 1
        imported = set(_imports(tree))
        found.modules |= imported
        found.names |= set(_used_names(tree))
        found.early_environ = found.early_environ or _early_environ(tree)
        found.names_recover = found.names_recover or _names_recover(tree)
        for module in imported:
            queue += _local(module, search_path, path.parent)
    return found


def _packages(entry: Path, search_path: Path) -> Iterator[Path]:
    if search_path in entry.parents:
        for folder in entry.parents:
            if folder == search_path:
                return
            yield folder


def _parse(path: Path) -> ast.Module | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None  # the worker must read what is in a pipe
        with warnings.catch_warnings(action="ignore"):  # the worker will print them
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # Python will report it with a traceback


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            if node.module:
                yield package
            # `from torch import optim` may name a module, `from . import model` too
            joint = "." if node.module else ""
            yield from (f"{package}{joint}{alias.name}" for alias in node.names)


def _used_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names as they are written; `import torch as t` is not followed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def _names_recover(tree: ast.Module) -> bool:
    """Whether a parser may know the argument: as a word, a variable, a parameter, an attribute.

    A comment or a docstring asks for nothing, nor does ``TrainState(is_recover=...)``.
    """
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(word)):
                if RECOVER in word and id(node) not in prose:
                    return True
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                if name == RECOVER:
                    return True
            case _:
                pass
    return False


def _early_environ(tree: ast.Module) -> str | None:
    """A variable that the module changes anywhere and that an import reads."""
    for node in ast.walk(tree):
        if _changes_environ(node):
            for name in _words(node):
                if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER):
                    return name
    return None


def _changes_environ(node: ast.AST) -> bool:
    """os.environ[X] = .., del, |=, any method except those that only read, putenv, unsetenv."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _says_environ(value)
        case ast.AugAssign(target=target):
            return _says_environ(target)
        case ast.Call(func=ast.Attribute(value=value, attr=method)):
            changes = _says_environ(value) and method not in LOOKS
            return changes or method in {"putenv", "unsetenv"}
        case _:
            return False


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Constant(value=str(word)) | ast.keyword(arg=str(word)):
                yield word


def _says_environ(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == "environ"


def _local(module: str, search_path: Path, folder: Path) -> Iterator[Path]:
    """Source files that ``module`` may refer to: beside the script, or relative to ``folder``."""
    dots = len(module) - len(module.lstrip("."))
    base = search_path if dots == 0 else folder
    for _ in range(dots - 1):
        base = base.parent
    for part in module[dots:].split("."):
        base = base / part
        yield from (
            path for path in (base.with_name(part + ".py"), base / "__init__.py") if path.is_file()
        )
