"""Turns an interpreter that was started as ``python -u train.py`` into a forkserver or a worker.

Python imports ``sitecustomize`` after it is set up and before it runs the script. The agent puts
this folder first on PYTHONPATH, so the process stops here, imports torch and waits for orders. A
forked worker *returns* from here, and the interpreter runs the user's script by itself:
``__main__``, ``sys.argv``, ``sys.path``, ``-m``, tracebacks, exit codes and ``ps`` are not imitated
but Python's own. (Stopping in ``sitecustomize`` is our idea; forking from a process that has
already loaded what all need follows Android's zygote.)

An interpreter that is not a worker must never run the script, whatever fails here.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def _serve(orders: str) -> None:
    """Run the forkserver; return in a forked worker, and only there."""
    try:
        from agent.forkserver import server

        server.serve_warm(orders, _ROOT)
    except BaseException:  # noqa: BLE001  whatever it is, the script must not run
        import traceback

        traceback.print_exc()
        os._exit(70)


def _start_cold(pythonpath: str) -> None:
    """In a fresh worker: only its streams are changed, and how DDP ends.

    ``pythonpath`` is the user's after a ``=``, or empty if it was not set.
    """
    if pythonpath:
        os.environ["PYTHONPATH"] = pythonpath[1:]
    else:
        del os.environ["PYTHONPATH"]
    from agent.forkserver import (
        after_import,
        shadow_start,
        sockets,
        tolerant_streams,
        unload,
    )
    from worker_hooks.distributed import ddp_release, rehearsal

    tolerant_streams.make_tolerant()
    after_import.call_after_import(ddp_release.DDP_MODULE, ddp_release.install)
    if rehearsal.is_wanted(os.environ):
        after_import.call_after_import(rehearsal.C10D, rehearsal.install)
    sockets.begin()
    shadow_start.begin(_ROOT)
    sys.path.remove(_ROOT)
    unload.unload_ours(_ROOT)


if "MSRUN_FORKSERVER" in os.environ or "MSRUN_STREAMS" in os.environ:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path.insert(0, _ROOT)
    if "MSRUN_FORKSERVER" in os.environ:
        _serve(os.environ.pop("MSRUN_FORKSERVER"))
    else:
        _start_cold(os.environ.pop("MSRUN_STREAMS"))

# Now the user's own sitecustomize is imported under its name; without one, Python gets the same
# "no such module" as without msrun.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401
