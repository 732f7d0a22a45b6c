"""What many ask for in one turn of the loop is done once."""

from agent.machine.loop_calls import OnceATurn


def test_it_is_called_once_a_turn_unless_somebody_must_be_sure():
    soon, done = [], []
    settle = OnceATurn(soon.append, lambda: done.append(None))
    settle(is_sure=False)
    settle(is_sure=False)
    assert len(done) == 1
    settle(is_sure=True)
    settle(is_sure=False)
    assert len(done) == 2
    (end_turn,) = soon
    end_turn()
    settle(is_sure=False)
    assert len(done) == 3


def test_a_sure_call_is_that_of_the_turn():
    soon, done = [], []
    settle = OnceATurn(soon.append, lambda: done.append(None))
    settle(is_sure=True)
    settle(is_sure=False)
    assert len(done) == len(soon) == 1
