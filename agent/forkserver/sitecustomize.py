"""Turns an interpreter that was started as ``python -u train.py`` into a forkserver or a worker.

Python imports ``sitecustomize`` after it is set up and before it runs the script. The agent puts
this folder first on PYTHONPATH, so here the process stops, imports torch and waits for orders. A
forked worker *returns* from here, and the interpreter goes on with the user's script by itself:
``__main__``, ``sys.argv``, ``sys.path``, ``-m``, tracebacks, exit codes, ``ps`` are not imitated,
they are Python's own. (The idea of stopping in ``sitecustomize`` is ours; Android's zygote is the
model for forking from a process that already loaded what all need.)

Nothing may fall through by accident: an interpreter that is not a worker must never run the script.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def _serve(orders: str) -> None:
    """Be a forkserver; return in a forked worker, and only there."""
    try:
        from agent.forkserver import server

        server.serve_warm(orders, _ROOT)
    except BaseException:  # noqa: BLE001  whatever it is, the script must not run
        import traceback

        traceback.print_exc()
        os._exit(70)


def _start_cold(pythonpath: str) -> None:
    """In a fresh worker: only its streams are msrun's business.

    ``pythonpath`` is the user's after a ``=``, or empty if it was not set.
    """
    if pythonpath:
        os.environ["PYTHONPATH"] = pythonpath[1:]
    else:
        del os.environ["PYTHONPATH"]
    from agent.forkserver import tolerant_streams, unload

    tolerant_streams.forgive()
    sys.path.remove(_ROOT)
    unload.unload_ours(_ROOT)


if "MSRUN_FORKSERVER" in os.environ or "MSRUN_STREAMS" in os.environ:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path.insert(0, _ROOT)
    if "MSRUN_FORKSERVER" in os.environ:
        _serve(os.environ.pop("MSRUN_FORKSERVER"))
    else:
        _start_cold(os.environ.pop("MSRUN_STREAMS"))

# A user's own sitecustomize gets its turn now, under its own name; without one, Python sees the
# same "no such module" that it would see without msrun.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401
