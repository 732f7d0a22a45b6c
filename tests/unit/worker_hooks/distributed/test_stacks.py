"""Where a rank's threads stand, and whether that is a collective."""

import os
import queue
import sysconfig
import threading

import pytest

from worker_hooks.contract import protocol
from worker_hooks.distributed import stacks
from worker_hooks.distributed.stacks import (
    MainCall,
    MainThread,
    inspect,
    is_at_prompt,
    is_in_collective,
)

SITE = "/venv/lib/python3.11/site-packages/torch"
STDLIB = sysconfig.get_paths()["stdlib"]
SCRIPT = MainCall("/home/me/train.py", 9, "train", "loss.backward()")
BACKWARD = (
    SCRIPT,
    MainCall(f"{SITE}/_tensor.py", 623, "backward", "torch.autograd.backward("),
    MainCall(
        "/site-packages/worker_hooks/training/torch_hooks.py", 52, "watched", "backward(tensors)"
    ),
    MainCall(f"{SITE}/autograd/__init__.py", 395, "backward", "_engine_run_backward("),
    MainCall(
        f"{SITE}/autograd/graph.py", 979, "_engine_run_backward", "return Variable._execution"
    ),
)


def at(text):
    """The script itself is the innermost frame."""
    return (SCRIPT, SCRIPT._replace(text=text))


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(BACKWARD, id="DDP's all-reduce"),
        pytest.param(
            (
                SCRIPT,
                MainCall(f"{SITE}/distributed/c10d_logger.py", 83, "wrapper", "return func(*args)"),
                MainCall(f"{SITE}/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()"),
            ),
            id="all_reduce",
        ),
        pytest.param(
            (
                SCRIPT,
                MainCall(f"{SITE}/distributed/rendezvous.py", 200, "x", "store.get()"),
                MainCall(f"{STDLIB}/threading.py", 320, "wait", "waiter.acquire()"),
            ),
            id="a rendezvous that waits by the standard library",
        ),
        pytest.param(
            (SCRIPT, MainCall(f"{SITE}/nn/parallel/distributed.py", 2000, "_sync_buffers", "dist._b")),
            id="DDP's buffers in forward",
        ),
        pytest.param(
            (
                SCRIPT,
                MainCall(f"{SITE}/distributed/_functional_collectives.py", 1, "wait_tensor", "x"),
                MainCall(f"{SITE}/_ops.py", 874, "__call__", "return self._op(*args)"),
            ),
            id="functional collective",
        ),
        pytest.param(at("work.wait()"), id="an asynchronous collective"),
        pytest.param(at("total += loss.item()"), id="the device"),
        pytest.param((*at("torch.cuda.synchronize()"), MainCall(f"{SITE}/cuda/__init__.py", 1, "synchronize", "")), id="the device, by hand"),
        pytest.param((*at("torch.accelerator.synchronize()"), MainCall(f"{SITE}/accelerator/__init__.py", 1, "synchronize", "")), id="any device, by hand"),
    ],
)  # fmt: skip
def test_these_wait_for_others(calls):
    assert is_in_collective(calls)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="no main thread"),
        pytest.param(at("time.sleep(1000)"), id="sleep"),
        pytest.param(at("while True: pass"), id="loop"),
        pytest.param((*at("lock.acquire()"),), id="deadlock"),
        pytest.param((*at("done.wait()"), MainCall(f"{STDLIB}/threading.py", 629, "wait", "signaled = self._cond.wait(timeout)")), id="an event of threading"),
        pytest.param((*at("q.get()"), MainCall(f"{STDLIB}/queue.py", 171, "get", "self.not_empty.wait()"), MainCall(f"{STDLIB}/threading.py", 320, "wait", "waiter.acquire()")), id="a queue"),
        pytest.param(
            (
                SCRIPT,
                MainCall(f"{SITE}/utils/data/dataloader.py", 630, "__next__", "data = self._next_data()"),
                MainCall(f"{STDLIB}/multiprocessing/connection.py", 940, "wait", "ready = selector.select(timeout)"),
            ),
            id="a data loader's workers",
        ),
        pytest.param((*BACKWARD, MainCall(f"{SITE}/autograd/function.py", 325, "apply", ""), SCRIPT._replace(text="time.sleep(9)")), id="a hook of the script's in backward"),
        pytest.param(
            (
                SCRIPT,
                MainCall(f"{SITE}/nn/parallel/distributed.py", 1, "forward", "self._run_ddp_forward()"),
                MainCall(f"{SITE}/nn/modules/module.py", 1, "_call_impl", "return forward_call()"),
                MainCall("/home/me/train.py", 3, "forward", "x = self.slow(x)"),
            ),
            id="the model within DDP",
        ),
        pytest.param((SCRIPT, MainCall(f"{SITE}/optim/adam.py", 5, "step", "denom.sqrt()")), id="an optimizer"),
    ],
)  # fmt: skip
def test_these_do_not(calls):
    assert not is_in_collective(calls)


PDB = (
    MainCall(f"{STDLIB}/bdb.py", 90, "trace_dispatch", "return self.dispatch_line(frame)"),
    MainCall(f"{STDLIB}/pdb.py", 270, "user_line", "self.interaction(frame, None)"),
    MainCall(f"{STDLIB}/pdb.py", 435, "interaction", "self._cmdloop()"),
    MainCall(f"{STDLIB}/cmd.py", 126, "cmdloop", "line = input(self.prompt)"),
)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((SCRIPT, *PDB), id="breakpoint()"),
        pytest.param((SCRIPT, *PDB[:3], MainCall("<stdin>", 1, "<module>", "")), id="a command at pdb's prompt"),
        pytest.param((SCRIPT, MainCall(f"{SITE}/distributed/__init__.py", 90, "breakpoint", "barrier()"), *PDB), id="torch.distributed.breakpoint()"),
        pytest.param((SCRIPT, MainCall("/venv/site-packages/IPython/core/debugger.py", 1, "interaction", "")), id="ipdb"),
        pytest.param((SCRIPT, MainCall("/venv/site-packages/IPython/terminal/embed.py", 1, "mainloop", "self.interact()")), id="IPython.embed()"),
        pytest.param((SCRIPT, MainCall("/venv/debugpy/_vendored/pydevd/pydevd.py", 1, "_do_wait_suspend", "time.sleep(.1)")), id="debugpy"),
        pytest.param((SCRIPT, MainCall(f"{STDLIB}/code.py", 1, "interact", "self.raw_input()")), id="code.interact()"),
        pytest.param(at('name = input("> ")'), id="input()"),
        pytest.param(at("for line in sys.stdin:"), id="a loop over stdin"),
        pytest.param((SCRIPT, MainCall(f"{STDLIB}/getpass.py", 77, "unix_getpass", "passwd = _raw_input()"), MainCall(f"{STDLIB}/getpass.py", 1, "_raw_input", "line = x")), id="getpass()"),
    ],
)  # fmt: skip
def test_these_wait_for_a_person(calls):
    assert is_at_prompt(calls)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="no main thread"),
        pytest.param(BACKWARD, id="backward"),
        pytest.param((MainCall(f"{STDLIB}/pdb.py", 1, "_run", ""), MainCall(f"{STDLIB}/bdb.py", 1, "run", ""), SCRIPT), id="a script that runs under pdb"),
        pytest.param((MainCall("/venv/debugpy/_vendored/pydevd/pydevd.py", 1, "_exec", ""), SCRIPT), id="a script that runs under debugpy"),
        pytest.param(at("x = model.input(batch)"), id="a method called input"),
        pytest.param(at("x = read_input(batch)"), id="a function called like it"),
        pytest.param((*at("input(1)"), SCRIPT), id="a function of the script's own that is called input"),
        pytest.param((SCRIPT, MainCall("/home/me/server.py", 1, "mainloop", "lock.acquire()")), id="another main loop"),
    ],
)  # fmt: skip
def test_these_wait_for_nobody(calls):
    assert not is_at_prompt(calls)


def test_an_inspection_writes_all_stacks_and_answers_with_the_main_threads(capfd):
    """The listener is another thread; the main one stands in a wait."""
    answers, asked = queue.Queue(), threading.Event()

    def listen():
        asked.wait(5)
        answers.put(inspect(3, 1, protocol.Inspect(7)))

    thread = threading.Thread(target=listen, name="msrun")
    other = threading.Thread(target=answers.join, name="a\udcffnother")
    answers.put(None)  # other waits
    answers.get()
    thread.start()
    other.start()
    asked.set()
    answer = answers.get(timeout=5)
    answers.task_done()
    answers.task_done()
    thread.join()
    other.join()
    assert (answer.rank, answer.attempt, answer.id, answer.is_in_collective) == (3, 1, 7, False)
    assert "test_stacks.py" in answer.text
    assert len(answer.text.splitlines()) <= 4
    err = capfd.readouterr().err
    assert "rank 3 is inspected" in err
    assert "thread MainThread (main)" in err
    assert r"thread a\udcffnother," in err
    assert "listen" not in err.replace("listening", "")  # itself is no news


def test_no_thread_is_kept_by_a_log_that_cannot_be_written(monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("worker_hooks.distributed.stacks.STDERR", full)
    assert inspect(0, 0, protocol.Inspect(1)).id == 1
    os.close(full)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_rank_whose_device_waits_is_no_culprit(is_busy, capfd):
    answers = queue.SimpleQueue()

    def listen():
        answers.put(inspect(3, 1, protocol.Inspect(7), is_device_busy=is_busy))

    listener = threading.Thread(target=listen)
    listener.start()
    listener.join()
    assert answers.get().is_in_collective == is_busy
    assert capfd.readouterr().err


def test_a_process_that_gets_no_processor_does_not_stand_still(monkeypatch):
    now, place = [0.0], [(1, 2)]
    monkeypatch.setattr(stacks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stacks, "main_instruction", lambda: place[0])
    main = MainThread()
    now[0] += 9.0  # neither this thread nor the main one ran
    assert main.still_s() == stacks.MOST_GAP_S
    for _ in range(10):
        now[0] += 0.02
        found = main.still_s()
    assert found == pytest.approx(stacks.MOST_GAP_S + 0.2)
    place[0] = (1, 3)
    assert main.still_s() == 0.0
