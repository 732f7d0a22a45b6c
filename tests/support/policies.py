"""Policies of the controller, by the flat names of their values. Not a test itself."""

from agent.spec.job_spec import DumpSpec, Policy, ReplaceSpec, Timeouts

GROUPS = {
    "timeouts": Timeouts(),
    "dump": DumpSpec(restarts_explicit=True),
    "replace": ReplaceSpec(),
}
GROUP_OF = {name: group for group, made in GROUPS.items() for name in made._fields}


def policy(ranks=(0, 1), max_restarts=0, stalls=3, **changes):
    """A policy with defaults, but for `changes`: fields of its groups, whose names are unique."""
    return altered_policy(Policy(ranks, max_restarts, stalls=stalls, **GROUPS), **changes)


def altered_policy(policy, **changes):
    own, inner = {}, {}
    for name, value in changes.items():
        if name in Policy._fields:
            own[name] = value
        else:
            inner.setdefault(GROUP_OF[name], {})[name] = value
    for group, changed in inner.items():
        own[group] = getattr(policy, group)._replace(**changed)
    return policy._replace(**own)
