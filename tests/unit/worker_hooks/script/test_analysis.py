"""Which local variables a training loop carries, on a table of loops as people write them."""

import ast
import textwrap

import pytest

from worker_hooks.script.analysis import analyse

STEP = "loss = f(net(x), y); loss.backward(); opt.step(); opt.zero_grad()"

TABLE = {  # what is carried, and whether it steers the training or is only printed
    "a usual loop": (
        """
        for epoch in state.epochs(3):
            net.train()
            for x, y in state.batches(loader):
                STEP
                sched.step()
            print(loss.item())
        """,
        {},
    ),
    "a running loss of an epoch": (
        """
        for epoch in state.epochs(3):
            running, count = 0.0, 0
            for x, y in tqdm(state.batches(loader)):
                STEP
                running += loss.item()
                count += 1
                if count % 10 == 0:
                    print(f"{running / 10}")
                    running = 0.0
            mean = running / count
            logger.info("epoch %d: %f", epoch, mean)
        """,
        {"running": "printed", "count": "printed"},
    ),
    "what is printed is calculated by who knows what": (
        """
        n, total = 0, 0.0
        for x, y in state.batches(loader):
            STEP
            n += 1
            total += round(loss.item(), 3)
            print(n, train_more(net, n), f"{sum([total]) / len(loader):.2f}")
        """,
        {"n": "steers", "total": "printed"},
    ),
    "a bar around the batches": (
        """
        hidden, bar = torch.zeros(8), tqdm(state.batches(loader))
        for x, y in bar:
            loss, hidden = f(net(x), hidden), g(x)
            loss.backward(); opt.step()
            bar.set_postfix(loss=loss.item())
        """,
        {"hidden": "steers"},
    ),
    "batches that are asked for one by one": (
        """
        hidden, it = torch.zeros(8), iter(state.batches(loader))
        while state.step < 10:
            x, y = next(it)
            loss, hidden = f(net(x), hidden), g(x)
            loss.backward(); opt.step()
        """,
        {"hidden": "steers"},
    ),
    "a prefetched batch": (
        """
        x, y = get_batch()
        while not state.should_exit:
            for micro in range(4):
                loss = f(net(x), y)
                x, y = get_batch()
                loss.backward()
            opt.step()
        """,
        {"x": "steers", "y": "steers"},
    ),
    "a counter that sets the learning rate": (
        """
        n = 0
        for x, y in state.batches(loader):
            lr = warm_up(n)
            for group in opt.param_groups:
                group["lr"] = lr
            STEP
            n += 1
        """,
        {"n": "steers"},
    ),
    "early stopping": (
        """
        best, patience, losses = 1e9, 0, deque(maxlen=5)
        for epoch in state.epochs(100):
            for x, y in state.batches(loader):
                STEP
                losses.append(loss.item())
            mean = sum(losses) / len(losses)
            if mean < best:
                best, patience = mean, 0
            else:
                patience += 1
            if patience == 3:
                break
        """,
        {"losses": "steers", "best": "steers", "patience": "steers"},
    ),
    "averaged weights in a dict": (
        """
        shadow = {name: each.clone() for name, each in net.state_dict().items()}
        for x, y in state.batches(loader):
            STEP
            for name, each in net.state_dict().items():
                shadow[name].mul_(0.9).add_(each, alpha=0.1)
        """,
        {"shadow": "steers"},
    ),
    "a meter of the script's own": (
        """
        meter = Meter()
        for x, y in state.batches(loader):
            STEP
            meter.update(loss.item())
        torch.save(meter, "meter")
        """,
        {"meter": "steers"},
    ),
    "a time": (
        """
        then = time.time()
        for x, y in state.batches(loader):
            STEP
            now = time.time()
            print(now - then)
            then = now
        """,
        {"then": "printed"},
    ),
    "set in some iterations, read behind the loop": (
        """
        for x, y in state.batches(loader):
            STEP
            if state.step % 10 == 0:
                last = loss.item()
        print(last)
        """,
        {"last": "printed"},
    ),
    "validation": (
        """
        for epoch in state.epochs(3):
            for x, y in state.batches(loader):
                STEP
            total = 0.0
            with torch.no_grad():
                for x, y in state.batches(checks):
                    total += f(net(x), y)
            plateau.step(total)
        """,
        {},
    ),
    "a closure": (
        """
        for x, y in state.batches(loader):
            def closure():
                loss = f(net(x), y)
                loss.backward()
                return loss
            loss = opt.step(closure)
        print(loss)
        """,
        {},
    ),
    "a counter in an inner function": (
        """
        n = 0
        def rate():
            nonlocal n
            n += 1
            return 1 / n
        for x, y in state.batches(loader):
            opt.param_groups[0]["lr"] = rate()
            STEP
        """,
        {"n": "steers"},
    ),
    "globals are put back": (
        """
        global n
        for x, y in state.batches(loader):
            STEP
            n += 1
        """,
        {},
    ),
    "an iterator of the script's own": (
        """
        batches = iter(loader)
        while not state.should_exit:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            STEP
        """,
        {"batches": "steers"},
    ),
    "accumulated gradients": (
        """
        for epoch in state.epochs(3):
            for i, (x, y) in enumerate(state.batches(loader)):
                with autocast():
                    loss = f(net(x), y) / 4
                scaler.scale(loss).backward()
                if state.batch % 4 == 0:
                    scaler.step(opt)
                    scaler.update()
        """,
        {},
    ),
    "a framework's object": (
        """
        meter = Meter()
        for x, y in state.batches(loader):
            STEP
            meter.clip_grad_norm_(net.parameters(), 1.0)
        """,
        {},
    ),
    "no loop of steps": ("n = 0\nfor x in loader:\n    n += 1\nprint(n)", {}),
    "a loop in another function": (
        """
        best = 0.0
        for epoch in range(state.epoch, 9):
            train_epoch(state)
            best = max(best, evaluate(net))
            schedule(best)
        """,
        {"best": "steers"},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_a_loop_carries(case):
    body, expected = TABLE[case]
    source = textwrap.dedent(body).replace("STEP", STEP)
    tree = ast.parse("def train(state):\n" + textwrap.indent(source, "    ")).body[0]
    found = analyse(tree, commits={"train_epoch"}, classes={"Meter"}).carried
    assert {
        each.name: "printed" if each.is_only_printed else "steers" for each in found
    } == expected


RETURNED = """
def train(state):
    total, best, losses, count = 0.0, 9.0, [], 0
    for epoch in state.epochs(3):
        for x, y in state.batches(loader):
            loss = f(net(x), y); loss.backward(); opt.step()
            total += loss.item()
            losses.append(loss.item())
            best = min(best, loss.item())
            count += 1
        mean = total / count
        if best < 0.1:
            return {"best": best}
    return mean, max(losses), evaluate(net, count)
"""


def test_what_training_only_returns_is_its_result():
    tree = ast.parse(RETURNED).body[0]
    assert not any(each.is_result for each in analyse(tree).carried)
    found = {each.name: each for each in analyse(tree, is_entry=True).carried}
    assert {name for name, each in found.items() if each.is_result} == {"total", "losses"}
    assert not any(each.is_only_printed for each in found.values())
    assert (found["total"].into, found["best"].into) == (("mean",), ())


def test_the_line_is_that_of_the_change_in_the_loop():
    tree = ast.parse("def f():\n n = 0\n for x in state.batches(y):\n  g(n)\n  n += 1").body[0]
    assert [each.line for each in analyse(tree).carried] == [5]


def test_at_the_top_level_what_no_iteration_hands_on_is_temporary():
    tree = ast.parse(
        "n = 0\n"
        "for x, y in state.batches(loader):\n"
        "    loss = f(x, y)\n"
        "    shown = loss.item()\n"
        "    n += 1\n"
        "def show():\n"
        "    print(shown)\n"
    )
    assert analyse(tree).temporary == {"x", "y", "loss"}  # not n, and not what a function reads
