"""What the controller's node and the others say to each other while the job runs. Pure.

To the controller's node: Fact, FromRank, FromRanks, PageSeen, PageNews, UpdatesReady, RankUnlinked,
FolderMarked, Beats, SweptNode, PartKept, MemoryTaken, CopyProgressed, CopyWritten, ToldAgain,
TermHeard, LogAsked, LogRead; from the next one also PagesKept.
To the others: JobKnown, NodesKnown, TermKnown, CheckpointKnown, BudgetKnown, Order, ToRank,
ToRanks, SaveFar, SaveHere, UpdatesCleared, Wake, TakeMemory, WriteCopy, ShownStatus, LogAsked,
LogRead, Ended; to the next one also WordKept, PageSeen, PageNews, PagesTold and, if it is the next
one no more, PagesLeft.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, get_args

from agent.machine.process_use import NEWS_BYTES
from agent.nodes.vocabulary import CodecError, Vocabulary
from agent.spec.spent_budget import ToldBudget
from worker_hooks.contract import protocol

_WHOSE = struct.Struct("<II")  # rank, attempt
_PIECE = struct.Struct("<QI")  # where it is in a page, and its size
_BEATS = struct.Struct("<QQII")  # ns, inspection, how many heartbeats, and the size of each
_BEAT_RANK = 4  # bytes of the rank before each
_PROCESS = struct.Struct(f"<I{NEWS_BYTES}s")  # rank, then as ProcessNews.packed

NOW = -1  # in place of an attempt: the present one
NO_NODE = -1


class NodeFacts(NamedTuple):
    """One node of the job."""

    rank: int
    host: str
    address: str  # as the controller's node sees it
    nproc: int
    pid: int  # of its msrun
    torch: str = ""  # its version; empty: not known
    door: int = 0  # the port at which it listens to take node 0's part; 0: it does not
    name: str = ""  # of its worker, if that was started by hand
    local_first: int = 0  # the local rank of its first worker, if each has an msrun of its own


class Fact(NamedTuple):
    """What happened to the processes of a node."""

    event: dict[str, object]  # as agent.nodes.codec


class FromRank(NamedTuple):
    """What a rank's hooks have said; its page, where what it says changes that, came before."""

    message: dict[str, object]  # as :func:`pack_said`


class WordKept(NamedTuple):
    """What a rank of the controller's node has said that stays true: it dies with that node."""

    message: dict[str, object]  # as :func:`pack_said`


class PageSeen(NamedTuple):
    """A rank's status page, as it is now.

    This, :class:`PageNews` and :class:`Beats` are bytes alone: so the JSON object of each is the
    same for thousands of nodes, and is read once.
    """

    packed: bytes

    @staticmethod
    def of(rank: int, attempt: int, page: bytes) -> PageSeen:
        """``page``: as agent.hooks.status_pages packs it."""
        return PageSeen(_WHOSE.pack(rank, attempt) + page)

    def read(self) -> tuple[int, int, bytes]:
        """Rank, attempt and page.

        Raises:
            CodecError: it is none.
        """
        return *_whose(self.packed), self.packed[_WHOSE.size :]


class PageNews(NamedTuple):
    """What a rank has written to its status page since the last time."""

    packed: bytes

    @staticmethod
    def of(rank: int, attempt: int, pieces: Iterable[tuple[int, bytes]]) -> PageNews:
        """``pieces``: where each is in the page, and its bytes."""
        parts = (_PIECE.pack(at, len(octets)) + octets for at, octets in pieces)
        return PageNews(b"".join((_WHOSE.pack(rank, attempt), *parts)))

    def read(self) -> tuple[int, int, list[tuple[int, bytes]]]:
        """Rank, attempt and pieces.

        Raises:
            CodecError: it is none.
        """
        octets, at = self.packed, _WHOSE.size
        rank, attempt = _whose(octets)
        pieces = []
        while at < len(octets):
            if len(octets) < at + _PIECE.size:
                raise CodecError("a piece of a page is cut short")
            where, size = _PIECE.unpack_from(octets, at)
            at += _PIECE.size
            if len(octets) < at + size:
                raise CodecError("a piece of a page is cut short")
            pieces.append((where, octets[at : at + size]))
            at += size
        return rank, attempt, pieces


class PagesLeft(NamedTuple):
    """Another node keeps copies of node 0's pages now: these here stand still."""


class PagesTold(NamedTuple):
    """The node that keeps copies of these pages is to say when it has all that was sent before."""

    attempt: int
    step: int  # that the ranks of node 0 are ready for


class PagesKept(NamedTuple):
    """The answer to PagesTold."""

    attempt: int
    step: int


class UpdatesReady(NamedTuple):
    """All ranks of a node are ready for the update of a step, and their pages came before this.

    Said again while ranks there wait: they ask whether the lines between the nodes live.
    """

    attempt: int
    step: int


class UpdatesCleared(NamedTuple):
    """All ranks of the job are ready for the update of step ``cleared``.

    The other numbers are those of :mod:`worker_hooks.contract.clearance_board`. Said again to all
    while ranks wait.
    """

    attempt: int
    first: int
    first_vote: int
    cleared: int
    is_in_doubt: bool = False  # a line between the controller's node and another one


class RankUnlinked(NamedTuple):
    """A rank is alive and has closed its link: it can be told nothing."""

    rank: int
    attempt: int


class FolderMarked(NamedTuple):
    """An empty file was made where a rank saves: the controller's node is to look for it."""

    rank: int
    attempt: int
    path: str


class Beats(NamedTuple):
    """How far the ranks of a node are, and what their processes do."""

    packed: bytes

    @staticmethod
    def of(
        now_ns: int,
        beats: Mapping[int, bytes],
        processes: Mapping[int, bytes],
        inspection: int,
    ) -> Beats:
        """Make it.

        Args:
            now_ns: by the node's monotonic clock, of which the times of heartbeats are.
            beats: the heartbeats that changed, by rank; all are of one size.
            processes: of all ranks that live, as ``ProcessNews.packed``.
            inspection: the newest one that its ranks were asked for before this was looked at.
        """
        size = len(next(iter(beats.values()), b""))
        form = _beat_form(size)
        parts = [_BEATS.pack(now_ns, inspection, len(beats), size)]
        parts += [form.pack(rank, beat) for rank, beat in beats.items()]
        parts += [_PROCESS.pack(rank, news) for rank, news in processes.items()]
        return Beats(b"".join(parts))

    def read(self) -> tuple[int, dict[int, bytes], dict[int, bytes], int]:
        """The arguments of :meth:`of`.

        Raises:
            CodecError: it is none.
        """
        octets, begin = self.packed, _BEATS.size
        try:
            now_ns, inspection, count, size = _BEATS.unpack_from(octets)
            end = begin + count * (size + _BEAT_RANK)
            beats = dict(_beat_form(size).iter_unpack(octets[begin:end])) if count else {}
            processes = dict(_PROCESS.iter_unpack(octets[end:]))
        except struct.error as error:
            raise CodecError(f"{len(octets)} bytes are no heartbeats: {error!s:.200}") from error
        if len(beats) != count:
            raise CodecError(f"{len(octets)} bytes are no heartbeats of {count} ranks")
        return now_ns, beats, processes, inspection


class SweptNode(NamedTuple):
    """No process of an attempt is left on a node; what it found of their ends."""

    attempt: int
    evidence: tuple[object, ...]  # as agent.failure.evidence_json


class NodesKnown(NamedTuple):
    """The nodes of the job, as another one has the place of a lost one."""

    nodes: tuple[NodeFacts, ...]


class JobKnown(NamedTuple):
    """The job as of the newest decision."""

    state: str
    attempt: int
    has_hooks: bool
    is_asked: bool = False  # somebody has asked it to stop
    is_apart: bool = False  # nodes save into different folders


class TermKnown(NamedTuple):
    """Which term of the controller's seat counts, if half of the nodes is lost.

    Answered by TermHeard.
    """

    term: str  # empty: the store does not count
    number: int  # of what was told so


class TermHeard(NamedTuple):
    """The node knows what it was told with this number."""

    number: int


class Order(NamedTuple):
    """What was decided, for the processes of a node."""

    action: dict[str, object]  # as agent.nodes.codec
    port: int = 0  # at which the ranks of the next attempt meet, if the action begins one


class ToRank(NamedTuple):
    """A message for a rank's hooks."""

    rank: int
    message: dict[str, object]  # as :func:`pack_said`


class ResumeFrom(NamedTuple):
    """A rank's Welcome, which names a checkpoint: it gets it once that is on its node's disk."""

    rank: int
    attempt: int
    message: dict[str, object]  # protocol.Welcome
    place: dict[str, object]  # as agent.nodes.checkpoint_copy.CheckpointPlace
    patience_s: float  # until it may be seen there by itself


class FromRanks(NamedTuple):
    """Several :class:`FromRank` that differ in their ranks alone."""

    ranks: tuple[int, ...]  # none: all of the node, so all nodes say the same bytes
    message: str  # JSON, that of any of them but for its rank: other nodes say the same text


class ToRanks(NamedTuple):
    """The same message for several ranks' hooks."""

    ranks: tuple[int, ...]  # none: all of the node, so all nodes are told alike
    message: dict[str, object]


class SaveFar(NamedTuple):
    """A rank writes to memory: have it do so there, and bring that to the controller's node.

    If it ``is_left`` there, only the header is brought of what others may fetch.
    """

    rank: int
    message: dict[str, object]  # protocol.Save, as the rank would get it on the controller's node
    port: int  # of that node
    key: str  # in hexadecimal: it lets the file in
    is_left: bool = False


class SaveHere(NamedTuple):
    """Ranks are to say what they hold: have them write it to their node's memory as well.

    Each group holds the same, and shares it out. A checkpoint with the digests that they say is not
    fetched then, see TakeMemory.
    """

    groups: tuple[tuple[int, ...], ...]
    message: dict[str, object]  # protocol.Save, as ranks get it that write nothing


class Wake(NamedTuple):
    """Send SIGCONT to a rank."""

    rank: int


class ToldAgain(NamedTuple):
    """The node's ranks train already, and all that is true of them has been told."""


class PartKept(NamedTuple):
    """A node has a file that a rank there has written of a state, and lets it be fetched.

    It is told before what the rank answers.
    """

    dump_id: int
    digest: str  # of the state
    part: int  # of it, which ranks there have shared out
    parts: int
    rank: int
    nbytes: int
    port: int  # as agent.nodes.transfer
    key: str  # hexadecimal


class DonorFile(NamedTuple):
    """A file that can be fetched, which ``rank`` has written."""

    rank: int
    nbytes: int
    host: str
    port: int
    key: str


class Donor(NamedTuple):
    """From where all files of a state can be fetched, headers and all."""

    variant: int
    files: tuple[DonorFile, ...]


class TakeMemory(NamedTuple):
    """Fetch a checkpoint in memory, and keep it until the next one, or until it is forgotten.

    With ``heads`` that is, of the files that are not private, in the manifest's order, as many
    bytes from their beginnings. The tensors of the states that are its ``own`` are fetched as well
    before it is said to be there, unless ranks of the node have written them: from the first of a
    state's donors that has them, or with another key, ``rest``, from the controller's node. From
    there come those of all others if a rank needs them, and the ``late`` ones if the ranks do not
    train again soon.
    What is little comes with the order: thousands of connections take longer than what they bring.
    """

    path: str  # its manifest's, on the controller's node
    manifest: str
    port: int  # as agent.nodes.transfer
    key: str  # hexadecimal; empty: nothing is to be fetched but the rest
    heads: tuple[int, ...] = ()
    rest: str = ""
    own: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    donors: tuple[Donor, ...] = ()
    alike: bytes = b""  # without a key: what all nodes get of files that are not private, deflated
    private: bytes = b""  # and the private ones


class MemoryTaken(NamedTuple):
    """A checkpoint in memory is there, or is not because of ``why_not``."""

    path: str  # that of the order, which stands for the copy in what this node is told
    why_not: str = ""


class WriteCopy(NamedTuple):
    """Write what ranks of the node have copied to a folder which all nodes share.

    Answered by CopyWritten, and until then now and then by CopyProgressed.
    """

    dump_id: int
    files: int  # the number of the set in which they are, as protocol.Copy
    manifest: str  # of these ranks' files, without their descriptors
    folder: str  # the name that it gets once it is complete


class CopyProgressed(NamedTuple):
    """Some of it is written."""

    dump_id: int


class CopyWritten(NamedTuple):
    """The files are on the disk, or are not because of ``why_not``."""

    dump_id: int
    folder: str  # as the order said
    manifest: str = ""  # of these files
    why_not: str = ""
    is_place: bool = False  # because of the folder


class CheckpointKnown(NamedTuple):
    """A checkpoint of the job is complete: who goes on without node 0 begins from no older one."""

    path: str
    step: int


class BudgetKnown(NamedTuple):
    """What the job has used up by now: whoever decides next goes on from there."""

    spent: ToldBudget


class ShownStatus(NamedTuple):
    """The state of the whole job, for those who ask on another node.

    Of a job of very many ranks it has that node's alone.
    """

    status: dict[str, object]
    step: int = 0  # the newest that any rank of the job has committed; 0: none


class LogAsked(NamedTuple):
    """Somebody on another node than a rank's wants to read its log. Answered by LogRead.

    It names a rank, or the node of an msrun that is meant itself, and no path. Who reads on asks
    again, with the same number.
    """

    question: int  # its number, by who asks
    rank: int
    attempt: int  # in which the process ran; NOW: the present one
    known: tuple[int, ...]  # of each of its files, as agent.rank_logs.reading: bytes read before
    waits: bool  # for something new, for a while
    node: int = NO_NODE  # the log of its msrun, and of no rank


class LogRead(NamedTuple):
    """Some bytes of a rank's log. Without being asked again: its end, as the attempt is over."""

    question: int
    data: bytes = b""
    file: int = 0  # in which of its files they are
    at: int = 0  # where in it
    left: int = 0  # bytes that nobody has read yet
    began: int = NOW  # the attempt in which the process began
    following: int = NOW  # in which the rank has its next process; NOW: this is the present one
    is_rest: bool = False  # the attempt is over, and nothing is left; or there will never be any
    why_not: str = ""  # there is nothing to read


class Ended(NamedTuple):
    """The job is over: every node's msrun ends with ``exit_code``."""

    exit_code: int
    reason: str
    state: str = ""  # of the job, as people are shown it; empty: not known
    goes_on: bool = False  # as another one, with more or with fewer nodes
    without_first: int = 0  # with so many, as node 0 has left; 0: it is there
    has_left: bool = False  # this node, and others go on


# fmt: off
RunMessage = (
    Fact | FromRank | FromRanks | WordKept | PageSeen | PageNews | PagesTold | PagesKept | PagesLeft
    | UpdatesReady | UpdatesCleared | RankUnlinked | FolderMarked | Beats | SweptNode | PartKept
    | MemoryTaken | JobKnown | NodesKnown | Order | ToRank | ToRanks | SaveFar | SaveHere | Wake
    | TakeMemory | WriteCopy | CopyProgressed | CopyWritten | ShownStatus | Ended | ToldAgain
    | ResumeFrom | TermKnown | TermHeard | CheckpointKnown | BudgetKnown | LogAsked | LogRead
)
ForLogs = LogAsked | LogRead
ForCopies = PageSeen | PageNews | WordKept
ForHooks = (
    ToRank | ToRanks | SaveFar | SaveHere | WriteCopy | UpdatesCleared | ForCopies | PagesTold
    | PagesLeft
)
# fmt: on

_SAID: Vocabulary[protocol.Message] = Vocabulary(
    kind
    for kind in get_args(protocol.Message)
    if kind not in {protocol.StartWorkers, protocol.PeerPages}
)
"""Messages between hooks and agent. Of those with descriptors beside them OpenVote travels alone:
each node has a board of its own."""

pack_said, unpack_said = _SAID.pack, _SAID.unpack
"""A message of hooks, or to them, as JSON, and back."""


def _whose(octets: bytes) -> tuple[int, int]:
    if len(octets) < _WHOSE.size:
        raise CodecError(f"{len(octets)} bytes are of no rank's page")
    rank, attempt = _WHOSE.unpack_from(octets)
    return rank, attempt


@lru_cache(maxsize=8)
def _beat_form(size: int) -> struct.Struct:
    return struct.Struct(f"<I{size}s")
