"""The sample for several machines: each section of its README, typed on two, does what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from shutil import which

import pytest
from support.cluster import Cluster
from support.documents import Block, blocks
from support.jobs import DEADLINE_S, ROOT, poll
from support.node_jobs import check_nothing_left
from support.typed_lines import Terminal, check_printed, lines_of
from support.warm_python import WarmPython

from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram

PAGE = ROOT / "scripts/samples/cluster/README.md"
BLOCKS = blocks("sh", "text", pages=[PAGE])
HEADINGS = {
    line.removeprefix("## "): number
    for number, line in enumerate(PAGE.read_text().splitlines(), 1)
    if line.startswith("## ")
}
PATIENT = ROOT / "tests/support/patient"
TRAIN = PAGE.with_name("train.py")
DIGESTS = re.compile(r"worker \d is at step \d+, weights \w{16}$", re.MULTILINE)
pytestmark = [pytest.mark.torch, pytest.mark.slow]


def of_section(heading: str) -> list[Block]:
    """The blocks below a heading."""
    begin = HEADINGS[heading]
    end = min((line for line in HEADINGS.values() if line > begin), default=1 << 20)
    return [block for block in BLOCKS if begin < block.line < end]


def digests(logs: Iterable[str]) -> set[str]:
    """What the weights of each rank have come to."""
    return {digest for log in logs for digest in DIGESTS.findall(log)}


SECTIONS = [heading for heading in HEADINGS if of_section(heading)]


class Machine:
    """A reader at one of the page's machines, whose folder /data is ``shared``.

    They may be busy: the trainings are patient.
    """

    def __init__(self, node: ClusterNode, shared: Path) -> None:
        self.node, self._shared = node, shared
        self._terminal = Terminal(self._start, node.folder / "terminal.sh")
        self._said: list[Path] = []
        self._running: NodeProgram | None = None
        self._code = 0

    def _start(self, words: Sequence[str], environ: Mapping[str, str], said: Path) -> NodeProgram:
        return self.node.run(words, {**environ, "PYTHONPATH": str(PATIENT)}, ROOT, stdout=said)

    def type(self, block: Block) -> None:
        """Type the lines; the last one may go on while other machines are looked at."""
        for line in lines_of(block):
            self.wait()
            here = line.replace("10.0.0.", "10.77.0.").replace("/data", str(self._shared))
            self._running, said = self._terminal.type(here)
            self._said.append(said)

    def wait(self) -> None:
        if self._running is not None:
            self._code = self._running.wait(DEADLINE_S)
            self._running = None

    def printed(self) -> tuple[str, int]:
        """Since the last time, and the exit code of the last line."""
        self.wait()
        text = "\n".join(path.read_text() for path in self._said)
        self._said.clear()
        return text, self._code


class Reader:
    """Plays blocks on two machines."""

    def __init__(self, cluster: Cluster) -> None:
        self.shared = cluster.folder / "data"
        self.shared.mkdir()
        names = ("10.0.0.1", "10.0.0.2")
        nodes = zip(names, cluster.nodes, strict=True)
        self._machines = {name: Machine(node, self.shared) for name, node in nodes}

    def read(self, page: Sequence[Block]) -> None:
        for block in page:
            words, _, condition = block.marker.partition(", once ")
            if condition:
                text, name = re.fullmatch(r'"(.*)" is in (\S+)', condition).groups()
                self._await(text, self.shared / name)
            for name, machine in self._machines.items():
                if block.language == "sh" and words in {f"on {name}", "on both machines"}:
                    machine.type(block)
                elif block.marker.startswith(f"output of {name}"):
                    check_printed(block, *machine.printed())
        for machine in self._machines.values():
            printed, code = machine.printed()
            assert code == 0, printed

    def _await(self, text: str, path: Path) -> None:
        try:
            poll(lambda: path.exists() and text in path.read_text())
        except AssertionError as error:
            raise AssertionError(self.told()) from error

    def told(self) -> str:
        logs = sorted(self.shared.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs)


def test_every_block_of_the_page_is_typed_or_compared() -> None:
    """None is of another machine, or in a section that nobody plays."""
    assert SECTIONS
    played = [BLOCKS[0], *(block for heading in SECTIONS for block in of_section(heading))]
    assert played == BLOCKS
    form = r"(on (10\.0\.0\.[12]|both machines)(, once .*)?|output of 10\.0\.0\.[12].*)"
    assert [block.id for block in BLOCKS if not re.fullmatch(form, block.marker)] == []


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_section_does_what_the_page_says(
    nodes: Callable[[int], Cluster],
    heading: str,
    tmp_path_factory: pytest.TempPathFactory,
    warm_python: WarmPython,
) -> None:
    blocks_here = [BLOCKS[0], *of_section(heading)]
    if any("certificates.sh" in each.text for each in blocks_here) and not which("openssl"):
        pytest.skip("to make certificates openssl would have to be installed")
    cluster = nodes(2)
    reader = Reader(cluster)
    reader.read(blocks_here)
    logs = [path.read_text() for path in reader.shared.glob("log*/worker_*.log")]
    undisturbed = reader.shared / "undisturbed.txt"
    if undisturbed.exists():  # of a longer training
        expected = [undisturbed.read_text()]
    else:
        expected = warm_python.train(tmp_path_factory.mktemp("undisturbed"), 8, TRAIN)
    assert digests(logs) == digests(expected), reader.told()
    assert len(digests(logs)) == 8
    check_nothing_left(*cluster.nodes)
