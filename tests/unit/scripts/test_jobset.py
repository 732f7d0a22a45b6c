"""The manifest for Kubernetes among the samples: its command is one of ours, its fields Kubernetes knows."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.jobset_schema import faults

from agent.spec.job_spec import ClusterSpec
from msrun.job.request import Request, parse

MANIFEST = Path(__file__).parents[3] / "scripts/samples/cluster/jobset.yaml"
CRDS = "MSRUN_TEST_CRDS"  # a folder with definitions of custom resources, which are not ours


def jobset() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def model() -> Any:
    """Of Kubeflow: half a second to import, which other processes that run tests need not."""
    name = "kubeflow_trainer_api.models.jobset_v1alpha2_job_set"
    return importlib.import_module(name).JobsetV1alpha2JobSet


def job() -> dict[str, Any]:
    """The Job that JobSet makes of it."""
    (replicated,) = jobset()["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    name = f"{jobset()['metadata']['name']}-{replicated['name']}-0"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        **replicated["template"],
    }


def container() -> dict[str, Any]:
    (found,) = job()["spec"]["template"]["spec"]["containers"]
    return found


def in_pod(index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Request:
    """What msrun understands in a pod, where Kubernetes has filled in the variables."""
    (tmp_path / "train.py").touch()
    environ = {
        "JOB_COMPLETION_INDEX": str(index),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "NAMESPACE": "research",
        "MSRUN_TOKEN": "secret",
        "HOSTNAME": f"{job()['metadata']['name']}-{index}",
        "XDG_STATE_HOME": str(tmp_path),
    }
    monkeypatch.chdir(tmp_path)
    program, *words = container()["command"]
    assert program == "msrun"
    filled = [word.replace("$(NAMESPACE)", "research") for word in words]
    assert "$(" not in "".join(filled)
    return parse([word.replace("/app/", f"{tmp_path}/") for word in filled], environ)


@pytest.mark.parametrize("index", [0, 3])
def test_each_pod_is_a_node_of_one_job(index, monkeypatch, tmp_path):
    request = in_pod(index, monkeypatch, tmp_path)
    assert request.warnings == ()
    assert request.job.cluster._replace(said=()) == ClusterSpec(4, None, index)
    assert (request.job.nproc, request.job.master_port) == (8, 29500)
    assert request.job.signals == ("SIGINT",)  # and so another way to end it is needed
    assert request.job.exit_file == Path("/data/graceful_exit.json")
    assert request.job.program.args == ("--is_recover=1",)


def test_the_job_has_as_many_pods_as_msrun_waits_for(monkeypatch, tmp_path):
    nnodes = in_pod(0, monkeypatch, tmp_path).job.cluster.nnodes
    assert job()["spec"]["completions"] == job()["spec"]["parallelism"] == nnodes


def test_the_nodes_meet_at_pod_0_by_the_name_in_its_own_hosts_file(monkeypatch, tmp_path):
    """HOSTNAME.SUBDOMAIN.NAMESPACE.svc.cluster.local, where JobSet's subdomain is its own name."""
    subdomain = jobset()["metadata"]["name"]
    wanted = f"{job()['metadata']['name']}-0.{subdomain}.research.svc.cluster.local"
    request = in_pod(0, monkeypatch, tmp_path)
    assert request.job.master_addr == wanted
    assert jobset()["spec"]["network"]["enableDNSHostnames"] is True
    assert container()["ports"] == [{"containerPort": request.job.master_port}]


def test_a_gpu_for_each_rank(monkeypatch, tmp_path):
    limits = container()["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == in_pod(0, monkeypatch, tmp_path).job.nproc


def test_kubernetes_knows_every_field_of_the_job():
    kubernetes_validate.validate(job(), "1.37", strict=True)
    wrong = job()
    wrong["spec"]["template"]["spec"]["containers"][0]["workingdir"] = "/data"
    with pytest.raises(kubernetes_validate.ValidationError, match="workingdir"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def unread(given: Any, read: Any, at: str = "") -> list[str]:
    """The fields that who has read them has left out, as a server does without a word."""
    if isinstance(given, list):
        pairs = enumerate(zip(given, read, strict=True))
        return [one for index, pair in pairs for one in unread(*pair, f"{at}[{index}]")]
    if not isinstance(given, dict):
        return []
    found = []
    for name, value in given.items():
        here = f"{at}.{name}".lstrip(".")
        found += unread(value, read[name], here) if name in read else [here]
    return found


def test_the_models_of_jobset_read_every_field():
    assert unread(jobset(), model().from_dict(jobset()).to_dict()) == []


@pytest.mark.parametrize(
    ("place", "name", "found"),
    [
        (["failurePolicy"], "maxRestart", "spec.failurePolicy.maxRestart"),
        (["network"], "enableDnsHostnames", "spec.network.enableDnsHostnames"),
        (["replicatedJobs", 0], "replica", "spec.replicatedJobs[0].replica"),
    ],
)
def test_a_field_that_jobset_does_not_have_is_found(place, name, found):
    wrong = jobset()
    inner = wrong["spec"]
    for word in place:
        inner = inner[word]
    inner[name] = 3
    assert unread(wrong, model().from_dict(wrong).to_dict()) == [found]


def test_a_value_of_another_kind_is_found():
    wrong = jobset()
    wrong["spec"]["failurePolicy"]["maxRestarts"] = "three"
    with pytest.raises(ValueError, match="maxRestarts"):
        model().from_dict(wrong)


def test_the_manifest_is_a_jobset():
    assert faults(jobset()) == []


GONE = object()  # in the place of a value: the field is left out


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("apiVersion", "jobset.x-k8s.io/v9", "apiVersion: 'jobset.x-k8s.io/v9' is not one of"),
        ("apiVersion", GONE, "'apiVersion' is a required property"),
        ("kind", "JobSetX", "kind: 'JobSetX' is not one of"),
        ("kind", GONE, "'kind' is a required property"),
        ("metadata", GONE, "'metadata' is a required property"),
        ("metadata.name", GONE, "metadata: 'name' is a required property"),
        ("metadata.name", "Train_1", "metadata.name: 'Train_1' does not match"),
        ("spec", GONE, "'spec' is a required property"),
        ("spec.replicatedJobs", GONE, "spec: 'replicatedJobs' is a required property"),
        ("spec.replicatedJobs", [], "spec.replicatedJobs: [] "),
        ("spec.replicatedJobs.0.name", GONE, "spec.replicatedJobs.0: 'name' is a required"),
        ("spec.replicatedJobs.0.template", GONE, "spec.replicatedJobs.0: 'template' is a required"),
        ("spec.replicatedJobs.0.template.spec", GONE, "0.template: 'spec' is a required property"),
        ("spec.replicatedJobs.0.replicas", -1, "0.replicas: -1 is less than the minimum of 0"),
        ("spec.replicatedJobs.0.replicas", "1", "0.replicas: '1' is not of type 'integer'"),
        ("spec.replicatedJobs.0.dependsOn", [{"name": "a", "status": "Done"}], "'Done' is not one"),
        ("spec.failurePolicy.restartStrategy", "Bogus", "restartStrategy: 'Bogus' is not one of"),
        ("spec.failurePolicy.maxRestarts", -3, "maxRestarts: -3 is less than the minimum of 0"),
        ("spec.failurePolicy.maxRestart", 3, "('maxRestart' was unexpected)"),
        ("spec.failurePolicy.rules", [{"name": "a", "action": "Wait"}], "'Wait' is not one of"),
        ("spec.successPolicy", {}, "spec.successPolicy: 'operator' is a required property"),
        ("spec.successPolicy", {"operator": "Most"}, "'Most' is not one of"),
        ("spec.startupPolicy", {"startupPolicyOrder": "Last"}, "'Last' is not one of"),
        ("spec.network.enableDNSHostnames", "yes", "'yes' is not of type 'boolean'"),
        ("spec.ttlSecondsAfterFinished", -1, "-1 is less than the minimum of 0"),
        ("spec.nodes", 4, "('nodes' was unexpected)"),
    ],
)
def test_what_is_no_jobset_is_refused(place, value, why):
    wrong = jobset()
    *outer, last = place.split(".")
    inner: Any = wrong
    for word in outer:
        inner = inner[int(word) if isinstance(inner, list) else word]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    (found,) = faults(wrong)
    assert why in found


def test_two_jobs_of_one_name_are_refused():
    wrong = jobset()
    wrong["spec"]["replicatedJobs"] *= 2
    assert faults(wrong) == ["spec.replicatedJobs: node is there twice"]


def test_jobsets_own_definition_knows_every_field():
    folder = os.environ.get(CRDS)
    if not folder:
        pytest.skip(f"set {CRDS} to a folder with JobSet's CustomResourceDefinition as a file")
    check = jsonschema.Draft7Validator(strict(schema_of(jobset(), Path(folder))))
    assert [error.message for error in check.iter_errors(jobset())] == []
    wrong = jobset()
    wrong["spec"]["failurePolicy"]["maxRestart"] = 3
    assert [error.message for error in check.iter_errors(wrong)] != []


def schema_of(resource: dict[str, Any], folder: Path) -> dict[str, Any]:
    """That of the resource's kind and version, of the definitions in a folder."""
    group, _, version = resource["apiVersion"].partition("/")
    for path in sorted(folder.glob("*.y*ml")):
        for found in yaml.safe_load_all(path.read_text()):
            spec = (found or {}).get("spec", {})
            kind = spec.get("names", {}).get("kind")
            if (spec.get("group"), kind) == (group, resource["kind"]):
                schemas = {each["name"]: each["schema"] for each in spec["versions"]}
                return schemas[version]["openAPIV3Schema"]
    raise AssertionError(f"{folder} has no definition of {resource['kind']} of {group}")


def strict(schema: Any) -> Any:
    """As JSON Schema, in which a field that is not named is an error.

    A server would drop it without a word.
    """
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(each) for name, each in schema.items()}
    if found.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    is_open = found.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in found
    if isinstance(found.get("properties"), dict) and not is_open:
        found["additionalProperties"] = False
    return found
