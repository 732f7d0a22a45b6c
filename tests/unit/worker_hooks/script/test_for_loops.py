"""Which loops around a question whether to exit begin anew, on a table of loops as people write them."""

import ast
import linecache
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from worker_hooks.script.flow import PLACES, Assignments, Flow
from worker_hooks.script.for_loops import begin_anew
from worker_hooks.training.script_frames import frames_of_script

HEAD = """
import itertools
from itertools import islice

def enumerate_data(): return list(range(8))
data = enumerate_data()
STEPS = 8
args = Args()

def get_batch(number):
    return number

def trained(batch):
    if batch is not None:
        opt.step()
"""
LOOPS = "def train(state):\n"

WRONG = {
    "a range": (
        """
        for step in range(args.iters):
            x, y = get_batch(step), 0
            trained(x)
            if state.should_exit:
                break
        """,
        ["for step in range(args.iters)"],
    ),
    "a question at the top": (
        """
        for x in data:
            if state.should_exit:
                break
            trained(x)
        """,
        ["for x in data"],
    ),
    "epochs and items": (
        """
        for epoch in range(3):
            for i, x in enumerate(data):
                trained(x)
                if state.should_exit:
                    return
        """,
        ["for epoch in range(3)", "for i, x in enumerate(data)"],
    ),
    "an epoch that continues, with items that do not": (
        """
        for epoch in state.epochs(3):
            order = make(data, epoch)
            for i in order:
                trained(data[i])
                if state.should_exit:
                    return
        """,
        ["for i in order"],
    ),
    "items that continue, in an epoch that does not": (
        """
        for epoch in range(3):
            for x in islice(data, state.batch, None):
                trained(x)
                if state.should_exit:
                    return
        """,
        ["for epoch in range(3)"],
    ),
    "more than it has to": (
        """
        for _ in range(8):
            trained(get_batch(state.step))
            if state.should_exit:
                break
        """,
        ["for _ in range(8)"],
    ),
    "an end that comes in time, and items that begin anew": (
        """
        for x in itertools.cycle(data):
            trained(x)
            if state.should_exit or state.step >= 8:
                break
        """,
        ["for x in itertools.cycle(data)"],
    ),
    "a count that only numbers": (
        """
        for step, x in enumerate(data, state.step):
            trained(x)
            if state.should_exit:
                break
        """,
        ["for step, x in enumerate(data, state.step)"],
    ),
    "one part of a zip": (
        """
        for step, x in zip(range(state.step, 8), data):
            trained(x)
            if state.should_exit:
                break
        """,
        ["for step, x in zip(range(state.step, 8), data)"],
    ),
    "a bar that begins later": (
        """
        for step in tqdm(range(8), initial=state.step):
            trained(get_batch(step))
            if state.should_exit:
                break
        """,
        ["for step in tqdm(range(8), initial=state.step)"],
    ),
    "what is printed from time to time": (
        """
        for step in range(8):
            trained(get_batch(step))
            if state.step % 4 == 3:
                print(state.step)
                continue
            if state.should_exit:
                break
        """,
        ["for step in range(8)"],
    ),
    "a function that asks": (
        """
        def leaves():
            return state.should_exit
        for step in range(8):
            trained(get_batch(step))
            if leaves():
                break
        """,
        ["for step in range(8)"],
    ),
    "a generator that asks": (
        """
        def guarded(items):
            for each in items:
                yield each
                if state.should_exit:
                    return
        for x in guarded(data):
            trained(x)
        """,
        ["for each in items"],
    ),
    "a trainer with a callback": (
        """
        class Protect:
            def __init__(self, state):
                self.state = state
            def on_step_end(self, trainer):
                trainer.is_stopping = self.state.should_exit
        class Trainer:
            def __init__(self, callback, data):
                self.callback, self.data, self.is_stopping = callback, data, False
            def train(self):
                for epoch in range(2):
                    for x in self.data:
                        if self.is_stopping:
                            return
                        trained(x)
                        self.callback.on_step_end(self)
        Trainer(Protect(state), data).train()
        """,
        ["for epoch in range(2)", "for x in self.data"],
    ),
    "other numbers of this name": (
        """
        other = Args()
        for number in range(other.epochs):
            trained(get_batch(number))
            if state.should_exit:
                return
        """,
        ["for number in range(other.epochs)"],
    ),
    "a stream whose epoch alone is set": (
        """
        stream = Stream(data)
        for epoch in state.epochs(2):
            stream.set_epoch(state.epoch)
            for x in stream:
                trained(x)
                if state.should_exit:
                    return
        """,
        ["for x in stream"],
    ),
    "an object with another attribute": (
        """
        args.begin = state.step
        log(args, data, state.step)
        for number in range(args.iters):
            for x in data:
                trained(x)
                if state.should_exit:
                    return
        """,
        ["for number in range(args.iters)", "for x in data"],
    ),
    "an inner loop that is no part of a step": (
        """
        for epoch in state.epochs(2):
            for x in data:
                trained(x)
                if state.should_exit:
                    return
            sched.step()
        """,
        ["for x in data"],
    ),
}
RIGHT = {
    "a while": """
        while not state.should_exit and state.step < 8:
            trained(get_batch(state.step))
        """,
    "nanoGPT": """
        number = 0
        while True:
            for micro in range(4):
                trained(None)
            trained(get_batch(number))
            if state.should_exit:
                break
            number += 1
            if number > 8:
                break
        """,
    "a range from the step": """
        for step in range(state.step, 8):
            trained(get_batch(step))
            if state.should_exit:
                break
        """,
    "a variable": """
        if state.should_exit:
            return
        start = max(state.step, 0)
        for step in tqdm(range(start, 8), initial=start):
            trained(get_batch(step))
            if state.should_exit:
                break
        """,
    "a count": """
        for step in itertools.count(state.step):
            if state.should_exit or step == 8:
                break
            trained(get_batch(step))
        """,
    "epochs and batches that are counted from the step": """
        first, skipped = divmod(state.step, len(data))
        for epoch in range(first, 3):
            for i in range(skipped if epoch == first else 0, len(data)):
                trained(data[i])
                if state.should_exit:
                    return
        """,
    "an epoch that continues": """
        for epoch in range(state.epoch, 3):
            state.epoch = epoch
            for x in islice(data, state.batch, None):
                trained(x)
                if state.should_exit:
                    return
        """,
    "one step an epoch": """
        for epoch in state.epochs(3):
            trained(data)
            if state.should_exit:
                return
        """,
    "items that are skipped": """
        number = 0
        for epoch in range(3):
            for x in data:
                if number < state.step:
                    number += 1
                    continue
                number += 1
                trained(x)
                if state.should_exit:
                    return
        """,
    "items that are not trained": """
        start = state.step
        for number, x in enumerate(data):
            if number >= start:
                trained(x)
                if state.should_exit:
                    break
        """,
    "an iterator that is advanced": """
        items = iter(data)
        for _ in range(state.step):
            next(items)
        for x in items:
            trained(x)
            if state.should_exit:
                break
        """,
    "an iterator that is advanced at once": """
        items = iter(data)
        consume(items, state.step)
        for x in items:
            trained(x)
            if state.should_exit:
                break
        """,
    "a stream that is set to its place": """
        stream = Stream(data)
        stream.seek(state.step)
        for x in tqdm(stream):
            trained(x)
            if state.should_exit:
                break
        """,
    "a stream whose place is set": """
        args.stream = Stream(data)
        args.stream.place = state.step
        for i, x in enumerate(args.stream):
            trained(x)
            if state.should_exit:
                break
        """,
    "items of its own count": """
        for _ in range(10**6):
            if state.should_exit or state.step >= 8:
                break
            trained(get_batch(state.step))
        """,
    "a while in phases": """
        for phase in range(2):
            while not state.should_exit and state.step < 4 * (phase + 1):
                trained(get_batch(state.step))
        """,
    "a range in phases": """
        for phase in range(2):
            for step in range(state.step, 4 * (phase + 1)):
                trained(get_batch(step))
                if state.should_exit:
                    return
        """,
    "a while that is tried again": """
        for _ in range(3):
            try:
                while state.step < 8:
                    trained(get_batch(state.step))
                    if state.should_exit:
                        return
            except ArithmeticError:
                pass
        """,
    "an argument": """
        def loop(first):
            for step in range(first, 8):
                trained(get_batch(step))
                if state.should_exit:
                    break
        loop(first=state.step)
        """,
    "a function of the state": """
        def remaining(state, epoch):
            for x in data[state.step - len(data) * epoch:]:
                yield x
        for epoch in range(2):
            for x in remaining(state, epoch):
                trained(x)
                if state.should_exit:
                    return
        """,
    "a generator that asks": """
        def guarded(items):
            for each in items:
                yield each
                if state.should_exit:
                    return
        for x in guarded(islice(data, state.step, None)):
            trained(x)
        """,
    "a trainer that is told where to begin": """
        class Trainer:
            def __init__(self, state):
                self.guard, self.begin = state, 0
            def restore(self):
                self.begin = self.guard.step
            def train(self):
                self.restore()
                for step in range(self.begin, 8):
                    trained(get_batch(step))
                    if self.guard.should_exit:
                        return
        Trainer(state).train()
        """,
    "a value of its own": """
        state.own.setdefault(count=0)
        for step in range(state.own.count, 8):
            trained(get_batch(step))
            state.own.count += 1
            if state.should_exit:
                return
        """,
    "an attribute that counts": """
        class Stream:
            place = 0
            def __iter__(self):
                while self.place < 8:
                    self.place += 1
                    yield self.place
        stream = Stream()
        for x in stream:
            trained(x)
            if state.should_exit:
                return
        """,
    "a loader that is saved": """
        TrainState(model=None, stream=data)
        for x in data:
            trained(x)
            if state.should_exit:
                return
        """,
    "parts of one step": """
        while state.step < 4:
            for micro in range(4):
                if state.should_exit:
                    return
                loss.backward()
            opt.step()
        """,
    "trainings, one after another": """
        for rate in (0.1, 0.2):
            mine = TrainState(rate)
            while not state.should_exit and state.step < 8:
                trained(get_batch(state.step))
        """,
    "a question behind the loop": """
        while not state.should_exit and state.step < 8:
            for part in data[:4]:
                trained(None)
            trained(1)
        """,
}


class Stream(list):
    """Hands out items from a place on."""

    def seek(self, place):
        self.place = place

    set_epoch = seek


class State:
    """Asks as ``state.should_exit`` does; a step was made since the last question."""

    def __init__(self, ignored):
        self.own = SimpleNamespace(setdefault=lambda **of: vars(self.own).update(of))
        self.step, self.batch, self.epoch = 0, 0, 0
        self.has_updated, self.ignored, self.told = False, ignored, {}

    def epochs(self, count):
        return range(count)

    @property
    def should_exit(self):
        if self.has_updated:
            self.step, self.has_updated = self.step + 1, False
            frames = frames_of_script(sys._getframe(1))
            script = [each for each in frames if each.f_code.co_filename.endswith("train.py")]
            self.told |= dict.fromkeys(begin_anew(script, self.ignored.__contains__))
        return self.step == 4


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What is found in this training function."""

    def told_of(body, ignored=()):
        path = tmp_path / "train.py"
        path.write_text(HEAD + LOOPS + textwrap.indent(textwrap.dedent(body), "    "))
        linecache.checkcache(str(path))
        module = ModuleType("__main__")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__", module)
        state = State(ignored)

        def update():
            state.has_updated = True

        quiet = SimpleNamespace(step=update, backward=lambda: None)
        vars(module).update(
            Args=lambda: SimpleNamespace(iters=8, epochs=8),
            opt=quiet,
            loss=quiet,
            sched=SimpleNamespace(step=lambda: None),
            tqdm=lambda items, **_: items,
            make=lambda items, _: range(len(items)),
            consume=lambda items, count: [next(items) for _ in range(count)],
            log=lambda *_: None,
            Stream=Stream,
            TrainState=lambda *_, **__: state,
        )
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        module.train(state)
        assert state.step, "no step was made"
        return [each.text for each in state.told]

    return told_of


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_begins_anew_is_found(told, name):
    body, expected = WRONG[name]
    assert told(body) == expected


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_that_continues_is_not(told, name):
    assert told(RIGHT[name]) == []


def test_the_script_may_say_that_it_skips_what_was_trained(told):
    body, _ = WRONG["epochs and items"]
    assert told(body, ["epoch"]) == ["for i, x in enumerate(data)"]
    assert told(body, ["epoch", "x"]) == []


def test_a_long_loop_is_cut(told):
    many = ", ".join(["1"] * 99)
    (text,) = told(f"for x in [{many}]:\n    trained(x)\n    if state.should_exit: break\n")
    assert text.startswith("for x in [1, 1, ")
    assert len(text) == 63


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = state.step; b = a + 1", True),
        ("b = state.step_size", False),
        ("a = 1\ndef f(): a = state.step\nb = a", False),
        ("def f():\n  global a\n  a = state.step\nb = a", True),
        ("def f(x, y): return y\nb = f(1, y=state.step)", True),
        ("def f(x): return x\nb = f(other.step)", False),
        ("class A:\n  def f(self): return state.epoch\nb = a.f()", True),
        ("class A:\n  def __init__(self): self.n = state.step\nb = A()", True),
        (
            "class A:\n  def __init__(self): print(state.step)\nclass B:\n  def __init__(self): pass\nb = B()",
            False,
        ),
        ("b = {'x': state.step}['x']", True),
        ("a['n'] = state.step; b = a['n']", True),
        ("a['n'] = state.step; b = a['m']", False),
        ("b = make(state)", True),
        ("def make(s): return s.step\nb = make(state)", True),
        ("def make(s): return 1\nb = make(state)", False),
        ("with f(state.step) as b: pass", True),
        ("print(b := state.step)", True),
        ("n = 0\ndef f():\n  global n\n  n += 1\nb = n", True),
        ("n = 0\ndef f():\n  n = 0\n  n += 1\nb = n", False),
    ],
)
def test_values_are_followed(text, expected):
    tree = ast.parse(f"state.should_exit\n{text}\nb")
    script = Assignments([tree])
    assert Flow(script, PLACES).reaches(tree.body[-1].value, script.scope(tree)) is expected
