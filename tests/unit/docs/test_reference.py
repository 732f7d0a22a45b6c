"""The reference names everything there is: names, parameters, variables, fields, packages."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import worker_hooks
from agent.controller.states import JobState, RankState
from agent.records.run_record import Record
from worker_hooks.callbacks.protocol import Callback, Training
from worker_hooks.contract.status_page import Phase
from worker_hooks.storage.manifest import Manifest, Shard

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
CODE = [
    path for folder in ("msrun", "agent", "worker_hooks") for path in (ROOT / folder).rglob("*.py")
]
NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")


def literals(page):
    """Words within a page's code spans and blocks."""
    text = (DOCS / page).read_text()
    spans = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    return {word for span in spans for word in re.findall(r"\w+", span)}


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", worker_hooks.__all__)
def test_every_public_name_has_its_place_and_all_its_parameters(name):
    text = (DOCS / "reference/python-api.md").read_text()
    assert re.search(rf"^## {name}$", text, re.MULTILINE) or f"| `{name}`" in text
    thing = getattr(worker_hooks, name)
    if not is_exception(thing):
        assert set(inspect.signature(thing).parameters) <= literals("reference/python-api.md")


def is_exception(thing):
    return isinstance(thing, type) and issubclass(thing, BaseException)


@pytest.mark.parametrize("name", ["TrainState", "ModelCheckpoint", "CheckpointConfig"])
def test_every_public_member_is_named(name):
    made = {
        "TrainState": lambda: worker_hooks.TrainState(model=torch.nn.Linear(1, 1)),
        "ModelCheckpoint": worker_hooks.ModelCheckpoint,
        "CheckpointConfig": worker_hooks.CheckpointConfig,
    }[name]()
    members = public(dir(made)) - {"append_dict"}  # what append_info's dict is kept as
    assert members <= literals("reference/python-api.md")


def test_every_moment_of_a_callback_is_named():
    named = public([*vars(Callback), *vars(Training), *dir(worker_hooks.ModelCheckpoint)])
    assert named <= literals("reference/python-api.md")


def test_every_variable_is_named():
    """Those of the contract, and every one that is looked up by its name."""
    contract = ast.parse((ROOT / "worker_hooks/contract/env.py").read_text())
    used = {
        node.value
        for node in ast.walk(contract)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    }
    for path in CODE:
        text = path.read_text()
        used |= set(re.findall(r"environ(?:\.get|\.pop)?[\[(]\s*\"([A-Z0-9_]+)\"", text))
    assert len(used) > 40
    values = {"TTP", "MS_WORKER"}
    assert used - values <= literals("reference/environment.md")


@pytest.mark.parametrize("kind", [Manifest, Shard, Record])
def test_every_field_of_a_manifest_and_a_record_is_named(kind):
    assert set(kind._fields) <= literals("reference/files.md")


def test_every_field_of_the_status_is_named_and_its_words_are_the_codes():
    schema = json.loads((DOCS / "reference/schemas/status.schema.json").read_text())
    job, rank = schema["properties"], schema["properties"]["workers"]["items"]["properties"]
    assert {*job, *rank} <= literals("reference/files.md")
    assert job["state"]["enum"] == [state.value for state in JobState]
    assert rank["state"]["enum"] == [state.value for state in RankState]
    assert rank["phase"]["enum"] == [phase.name.lower() for phase in Phase]


def test_every_entry_of_the_journal_is_described():
    schema = json.loads((DOCS / "reference/schemas/events.schema.json").read_text())
    noted = {
        name
        for path in CODE
        for name in re.findall(r"journal\.event\(\s*\"(\w+)\"", path.read_text())
    }
    assert len(noted) > 10
    assert noted <= schema["$defs"].keys()


def test_every_package_is_in_the_overview():
    text = (DOCS / "architecture/overview.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    packages = {path.parent.name for path in CODE if path.name == "__init__.py"}
    assert packages - {"agent", "msrun", "worker_hooks"} <= rows


@pytest.mark.parametrize(
    "page", sorted((DOCS / "architecture").glob("*.md")), ids=lambda page: page.stem
)
def test_every_class_that_a_page_names_is_there(page):
    schema = json.loads((DOCS / "reference/schemas/events.schema.json").read_text())
    defined = {
        name
        for path in CODE
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)\b[`(]", page.read_text()))
    assert named <= defined | schema["$defs"].keys()


def test_every_decision_is_in_the_index():
    index = (DOCS / "decisions/README.md").read_text()
    records = sorted((DOCS / "decisions").glob("0*.md"))
    assert re.findall(r"\| \[(\d{4})\]\((.*)\) \|", index) == [
        (path.name[:4], path.name) for path in records
    ]
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))


@pytest.mark.parametrize("nbytes", [100, 4 << 20, (4 << 20) + 1, 9_000_000])
def test_the_checksum_of_the_manual_is_the_checksum(tmp_path, nbytes):
    from worker_hooks.storage.checksum import of_file

    text = (DOCS / "architecture/checkpoint-format.md").read_text()
    (block,) = [
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "hashlib" in each
    ]
    scope = {}
    exec(block, scope)
    path = tmp_path / "file"
    path.write_bytes((1000).to_bytes(8, "little") + bytes(range(250)) * (nbytes // 250))
    assert scope["checksum"](path) == of_file(path, lambda _: None)
