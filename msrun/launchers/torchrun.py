"""torchrun, and ``accelerate launch`` that runs it, hand over to msrun: ``--rdzv-backend=msrun``.

torch finds a rendezvous backend by its name among the entry points ``torchrun.handlers``, and asks
it for a rendezvous before anything of the job is started. This one replaces the process by msrun,
with the options that torchrun has read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_RUN = "run", os.path.join("torch", "distributed", "run.py")
"""torchrun's function that has its options as ``args``, and the end of its file's path."""

_DEFAULTS = {"start_method": "spawn", "master_port": "29500"}
"""torchrun's defaults where msrun has others; given by hand, they cannot be told from defaults."""

_POSITIONAL = {"training_script", "training_script_args", "use_env"}

_NOT_TORCHRUN = (
    "--rdzv-backend=msrun works in commands of torchrun and accelerate launch: to start a function "
    "in ranks of its own, use msrun.launch"
)


def register() -> Callable[[object], NoReturn]:
    """The entry point; torch calls it with each import of its rendezvous, so it imports nothing."""
    return hand_over


def hand_over(_: object) -> NoReturn:
    """Become msrun, with the options of the torchrun command that asks for a rendezvous.

    Raises:
        SystemExit: 2, behind one sentence: they cannot be translated.
    """
    from agent.spec.job_spec import UsageError

    try:
        words = words_of(_options_of_torchrun(), os.environ)
    except UsageError as error:
        print(f"msrun: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    program = os.path.join(os.path.dirname(os.path.dirname(__file__)), "__main__.py")
    os.execv(sys.executable, [sys.executable, program, *words])


def words_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, ...]:
    """What stands behind ``msrun`` for a job with these options of torchrun.

    Args:
        options: by name, as torchrun's parser returns them.
        environ: msrun's own; it reads the ``PET_*`` variables again.

    Raises:
        UsageError: this torchrun has an option that msrun does not know, and it is in use.
    """
    from agent.spec.job_spec import UsageError
    from msrun.options.argv import CommandLine, command_words
    from msrun.options.settings import Setting
    from msrun.options.table import BY_DEST, Kind

    given: dict[str, Setting] = {}
    for name, value in options.items():
        option, text = BY_DEST.get(name), _text(value)
        if name in _POSITIONAL:
            continue
        if option is None:
            if text not in {"", "0"}:
                raise UsageError(f"msrun does not know torchrun's --{name.replace('_', '-')}")
            continue
        if option.kind is Kind.FLAG:
            text = text or "0"  # accelerate has None
        known = environ.get(option.env or "") or _DEFAULTS.get(name, option.default)
        if text in {"", known}:
            continue
        if option.kind is Kind.FLAG and text == "0":
            raise UsageError(f"{option.env}={known}: unset it, as {option.long} is not given")
        given[name] = Setting(text, option.long)
    arguments = tuple(map(str, options["training_script_args"]))
    if not options.get("use_env", True):  # of python -m torch.distributed.launch
        arguments = ("--local-rank=${local_rank}", *arguments)
    return command_words(CommandLine(given, str(options["training_script"]), arguments))


def _options_of_torchrun() -> dict[str, Any]:
    """The options of the torchrun that called this.

    Raises:
        UsageError: it is another program that did.
    """
    from agent.spec.job_spec import UsageError

    name, file = _RUN
    frame = sys._getframe()  # noqa: SLF001
    while frame is not None:
        code, args = frame.f_code, frame.f_locals.get("args")
        is_run = code.co_name == name and code.co_filename.endswith(file)
        if is_run and hasattr(args, "training_script_args"):
            return dict(vars(args))
        frame = frame.f_back  # type: ignore[assignment]  # of the caller, if there is one
    raise UsageError(_NOT_TORCHRUN)


def _text(value: Any) -> str:
    """A value as it is typed; empty: none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list | tuple):
        return ",".join(str(each).replace(",", ",,") for each in value)
    return str(value)
