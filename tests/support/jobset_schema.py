"""What a JobSet (jobset.x-k8s.io/v1alpha2) must be, in our own words, from the API that JobSet documents.

Required fields, kinds, choices and least values; what a Job is Kubernetes' own schema tells. It is a
little stricter than a server, which also takes a set of no jobs and a negative number of restarts.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "array", "items": TEXT}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
# a part of the names of pods, which are labels of DNS
NAME: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}


def _object(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


_ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
_RULE = _object(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=_one_of(*_ACTIONS),
    onJobFailureReasons=TEXTS,
    onJobFailureMessagePatterns=TEXTS,
    targetReplicatedJobs=TEXTS,
)
_REPLICATED = _object(
    ("name", "template"),
    name=NAME,
    groupName=NAME,
    replicas=COUNT,
    dependsOn=_list(
        _object(("name", "status"), name=NAME, status=_one_of("Ready", "Complete")),
    ),
    template={"type": "object", "required": ["spec"]},
)
_SPEC = _object(
    ("replicatedJobs",),
    replicatedJobs=_list(_REPLICATED, least=1),
    network=_object(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=NAME),
    failurePolicy=_object(
        maxRestarts=COUNT,
        restartStrategy=_one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=_list(_RULE),
    ),
    successPolicy=_object(
        ("operator",), operator=_one_of("All", "Any"), targetReplicatedJobs=TEXTS
    ),
    startupPolicy=_object(
        ("startupPolicyOrder",), startupPolicyOrder=_one_of("AnyOrder", "InOrder")
    ),
    coordinator=_object(("replicatedJob",), replicatedJob=NAME, jobIndex=COUNT, podIndex=COUNT),
    suspend=FLAG,
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
    volumeClaimPolicies=_list({"type": "object"}),
)
JOBSET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_one_of("jobset.x-k8s.io/v1alpha2"),
    kind=_one_of("JobSet"),
    metadata={"type": "object", "required": ["name"], "properties": {"name": NAME}},
    spec=_SPEC,
)


def faults(manifest: object) -> list[str]:
    """What is wrong with it, each as ``place: why``; where two jobs have one name, too."""
    errors = jsonschema.Draft7Validator(JOBSET).iter_errors(manifest)
    found = [f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in errors]
    if found or not isinstance(manifest, dict):
        return sorted(found)
    names = [each["name"] for each in manifest["spec"]["replicatedJobs"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"spec.replicatedJobs: {name} is there twice" for name in twice]
