"""Events and actions by kind, where a kind may be a message of the protocol. Not a test itself."""

from dataclasses import replace

from agent.controller import actions as do


def altered(event, **fields):
    """An event, or a message that is one, with other fields."""
    return event._replace(**fields) if isinstance(event, tuple) else replace(event, **fields)


def is_order(action, kind):
    """Whether an action is of a kind, or hands on a message of that kind."""
    return isinstance(action, kind) or (
        isinstance(action, do.Tell) and isinstance(action.message, kind)
    )


def ordering(action, **fields):
    """An action, or the message that it hands on, with other fields."""
    if isinstance(action, do.Tell) and not fields.keys() & {"ranks"}:
        return replace(action, message=action.message._replace(**fields))
    return replace(action, **fields)
