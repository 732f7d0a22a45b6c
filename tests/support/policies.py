"""Policies of the controller, by the flat names of their values. Not a test itself."""

from agent.spec.job_spec import DumpSpec, Policy, ReplaceSpec, Timeouts

GROUPS = {
    "timeouts": Timeouts(),
    "dump": DumpSpec(restarts_explicit=True),
    "replace": ReplaceSpec(),
}


def policy(ranks=(0, 1), max_restarts=0, stalls=3, **changes):
    """A policy with defaults, but for `changes`: fields of its groups, whose names are unique."""
    return altered_policy(Policy(ranks, max_restarts, stalls=stalls, **GROUPS), **changes)


def altered_policy(policy, **changes):
    for name, value in changes.items():
        if name in Policy._fields:
            policy = policy._replace(**{name: value})
        else:
            (group,) = (each for each in GROUPS if name in GROUPS[each]._fields)
            changed = getattr(policy, group)._replace(**{name: value})
            policy = policy._replace(**{group: changed})
    return policy
