"""The checks of the manual find what is wrong, and nothing else."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts/documentation"))  # as for a script in that folder

import dead_links  # noqa: E402
import manual  # noqa: E402
import mkdocs_hook  # noqa: E402
import unknown_options  # noqa: E402
from markdown_pages import read  # noqa: E402


@pytest.fixture
def repository(tmp_path):
    """A small one with two pages and a file of code."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/run.py").write_text("class Run:\n    def settle(self): ...\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text(
        "# Other\n\n## The `--max-restarts` budget\n\n## Twice\n\n## Twice\n"
    )
    return tmp_path


def found_in(repository, text):
    path = repository / "docs/page.md"
    path.write_text(text)
    pages = {each: read(each) for each in (path, repository / "docs/other.md")}
    return list(dead_links.problems(pages[path], pages, repository))


@pytest.mark.parametrize(
    "text",
    [
        "[web](https://example.org/none) [mail](mailto:a@example.org)",
        "[page](other.md) [code](../agent/run.py) [folder](../agent)",
        "[heading](other.md#the---max-restarts-budget) [second](other.md#twice-1)",
        "# Here\n\n[here](#here)",
        "[`run.py::settle`](../agent/run.py) [`run.py::Run`](../agent/run.py)",
        "`agent/run.py`, `agent/run.py::settle`, `agent/`, `msrun/{name}.py`",
        "```python\n[no](link.md)\n```\n\n`[no](link.md)`",
    ],
)
def test_links_that_lead_somewhere_are_left_alone(repository, text):
    assert found_in(repository, text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[page](none.md)", "no such file: none.md"),
        ("![picture](none.png)", "no such file: none.png"),
        ("| a |\n| --- |\n| [page](none.md) |", "no such file: none.md"),
        ("[by name][x]\n\n[x]: none.md", "no such file: none.md"),
        ("[heading](other.md#three-times)", "no such heading: other.md#three-times"),
        ("[third](other.md#twice-2)", "no such heading: other.md#twice-2"),
        ("# Here\n\n[there](#there)", "no such heading: #there"),
        ("[`run.py::gone`](../agent/run.py)", "../agent/run.py does not define gone"),
        ("`agent/gone.py`", "no such file: `agent/gone.py`"),
        ("`agent/run.py::gone`", "`agent/run.py::gone` is not defined there"),
    ],
)
def test_a_dead_link_is_found(repository, text, problem):
    assert found_in(repository, text) == [problem]


def options_in(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    return list(unknown_options.problems(read(page)))


@pytest.mark.parametrize(
    "text",
    [
        "`--max-restarts`, `--max_restarts=3`, `-m`, `--keep`, `--duplicate-*-filters`",
        "`msrun stop [--graceful]` and `msrun drill --kill rank=1,step=2 -- --worker_num=2 x.py`",
        "    $ msrun --worker_num=8 train.py --lr 0.1 --of-the-script",
        "```sh\nPET_ROLE=x srun msrun --nproc=2 \\\n  train.py  # a comment's quote\n```",
        "```\nmsrun checkpoints ckpts --json\npip install --upgrade x\n```",
        "```python\nmsrun --of-python\n```",
        "torchrun's `pip --upgrade`, and a sentence that says `msrun` didn't start",
    ],
)
def test_options_that_exist_are_left_alone(tmp_path, text):
    assert options_in(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("`--max-restart-count`", "--max-restart-count"),
        ("`msrun --worker_nums=8 train.py`", "--worker_nums"),
        ("`msrun stop --gracefully`", "--gracefully"),
        ("`msrun checkpoints merge X --dry-run`", "--dry-run"),
        ("    msrun drill --kill rank=1 -- --worker_nums=2 train.py", "--worker_nums"),
        ("```\nmsrun \\\n  --worker_nums=2 train.py\n```", "--worker_nums"),
    ],
)
def test_an_option_that_does_not_exist_is_found(tmp_path, text, named):
    (problem,) = options_in(tmp_path, text)
    assert named in problem


def test_a_stale_page_is_found_and_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(manual, "DOCS", tmp_path)
    assert sorted(manual.generate()) == sorted(manual.GENERATED)
    assert list(manual.stale()) == []
    (tmp_path / "reference/events.md").write_text("of yesterday")
    assert list(manual.stale()) == ["reference/events.md"]
    assert list(manual.generate()) == ["reference/events.md"]
    assert list(manual.stale()) == []


def test_the_site_names_what_lies_outside_of_the_manual():
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path="/repo/docs/architecture/x.md"))
    text = "[`run.py`](../../agent/run.py) and [a page](../reference/files.md#dumps)"
    shown = mkdocs_hook.on_page_markdown(
        text, page=page, config=SimpleNamespace(docs_dir="/repo/docs")
    )
    assert shown == "`run.py` and [a page](../reference/files.md#dumps)"
