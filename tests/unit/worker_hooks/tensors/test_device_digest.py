"""A digest that a device takes is the host's, and the link to it carries only what it must."""

import threading

import pytest
import torch
from support.far_memory import PLACE, FarDevice, FarEvent, FarStream, FarTensor, stay_far
from support.tensors import DTYPES, bits, everything, layouts, noise

from worker_hooks.device import side_stream
from worker_hooks.device.side_stream import DeviceAccess
from worker_hooks.state.registry import pieces_of
from worker_hooks.state.replication import fingerprint
from worker_hooks.tensors import shard
from worker_hooks.tensors.device_digest import add_tensor, is_summed_there, side_streams
from worker_hooks.tensors.fast_digest import ROW, SMALL, FastDigest
from worker_hooks.tensors.reader import PIECE, Reader
from worker_hooks.tensors.shard import Replica, quick_digest, write_quick
from worker_hooks.tensors.tensor_bytes import entry_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

PART = 100 * ROW  # that the device of these tests sums up at once
LARGE = noise((PART,), torch.uint8)
SIZES = [
    *(0, 1, 7, 512, SMALL - 1, SMALL, SMALL + 1, SMALL + 7, SMALL + 8),
    *(32 * ROW - 1, 32 * ROW, 32 * ROW + 1, 33 * ROW - 8, 33 * ROW),
    *(PART - 1, PART, PART + 1, PART + ROW, 2 * PART, 3 * PART + SMALL + 5),
    *(PIECE - 1, PIECE, PIECE + 1, 2056 << 10, (2056 << 10) + 1, (2056 << 10) - 1),
]


@pytest.fixture(autouse=True)
def _far(monkeypatch):
    stay_far(monkeypatch)
    monkeypatch.setattr(side_stream, "WAIT_S", 0.01)


@pytest.fixture
def far():
    return FarDevice()


@pytest.fixture
def side(far):
    return far.side(LARGE, most_bytes=PART)


def of_host(tensors, rest="{}"):
    return Replica(tensors, (), rest, {})


def of_device(far, side, tensors, rest="{}"):
    there = {name: far.tensor(each) for name, each in tensors.items()}
    return Replica(there, (), rest, {}, far.access(side))


def named(*tensors):
    return {f"{place:03}": each for place, each in enumerate(tensors)}


def row_sums(nbytes):
    """What is copied of a tensor's sums."""
    parts = -(-(nbytes // ROW * ROW) // PART)
    return nbytes // ROW * 8 + parts * ROW


# --- equal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_tensor_of_any_size_has_the_hosts_digest(far, side, nbytes):
    tensors = named(noise((nbytes,), torch.uint8, nbytes), noise((9,), torch.float32))
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert (far.summed > 0) == (nbytes >= SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_type_has_the_hosts_digest(far, side, dtype):
    count = SMALL // dtype.itemsize
    tensors = named(*(noise((count + more,), dtype, more) for more in (-1, 0, 1, 67, 2 * count)))
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.summed > 0


def test_ranks_compare_what_devices_summed_up(far, side):
    pieces = pieces_of({"w": LARGE.clone(), "v": LARGE[: SMALL + 9].clone()})
    wanted = fingerprint(pieces)
    for piece in pieces:
        (name,), (tensor,) = piece.tensors().keys(), piece.tensors().values()
        piece.tensors = lambda name=name, tensor=tensor: {name: far.tensor(tensor)}
    assert fingerprint(pieces, access=far.access(side)) == wanted
    assert far.summed > LARGE.nbytes


@pytest.mark.parametrize("offset", range(17))
def test_a_tensor_at_any_address_has_the_hosts_digest(far, side, offset):
    whole = noise((2 * PART + 64,), torch.uint8)
    tensors = named(whole[offset : offset + PART + 99])
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert (far.summed > 0) == (tensors["000"].data_ptr() % 8 == 0)


@pytest.mark.parametrize("made", [everything, layouts])
def test_any_layout_has_the_hosts_digest(far, side, made):
    tensors = made()
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))


def test_an_address_that_no_view_can_name_is_read(far, side):
    memory = bytearray(PART + 64)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    first = -(flat.data_ptr() + 3) % 8  # aligned in memory, but not counted from the base
    odd = torch.frombuffer(memory, dtype=torch.uint8, offset=3)[first : first + PART]
    assert odd.data_ptr() % 8 == 0
    tensors = named(odd.copy_(noise((PART,), torch.uint8)))
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))


def test_a_changed_bit_shows(far, side):
    tensor = noise((PART + SMALL + 3,), torch.uint8)
    wanted = quick_digest(of_device(far, side, named(tensor)))
    for place in (0, ROW - 1, ROW, PART - 1, PART, len(tensor) // ROW * ROW, len(tensor) - 1):
        for bit in (1, 128):
            tensor[place] ^= bit
            assert quick_digest(of_device(far, side, named(tensor))) != wanted
            tensor[place] ^= bit
    assert quick_digest(of_device(far, side, named(tensor))) == wanted


# --- what the link carries ------------------------------------------------------------------------


def test_the_double_sees_what_is_made_and_copied(far):
    tensor = far.tensor(LARGE)
    tensor[::2].contiguous()
    assert far.made == ["contiguous"]
    torch.empty(5, dtype=torch.uint8).copy_(tensor[:5])
    assert (far.copied, far.elsewhere) == (5, ["copy_"])


def test_a_digest_copies_the_sums_and_what_fills_no_row(far, side):
    sizes = (3 * PART + 5, SMALL, SMALL - 1, 40 * ROW)
    tensors = named(*(noise((size,), torch.uint8, size) for size in sizes))
    done = []
    quick_digest(of_device(far, side, tensors), done.append)
    large = [size for size in sizes if size >= SMALL]
    wanted = sum(row_sums(size) + size % ROW for size in large) + SMALL - 1
    assert far.copied == wanted
    assert sum(done) == sum(sizes)
    assert max(done) <= PART
    assert far.made == []
    assert far.elsewhere == []


STATE = {
    "w": noise((300, 5000), torch.float32),  # is cut
    "v": noise((257, 300, 20), torch.bfloat16, 1),
    "m": noise((70, 400), torch.float64, 2),  # is not
    "s": noise((5,), torch.float32, 3),
    "t": noise((1030, 1050), torch.float32, 4).t(),  # not in order
}


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_a_part_is_the_same_file_and_little_else_is_read(far, side, tmp_path, parts):
    host, device = of_host(STATE), of_device(far, side, STATE)
    buffers = [(entry_of("b", STATE["s"]), memoryview(bytes(20)))]
    host, device = host._replace(buffers=buffers), device._replace(buffers=buffers)
    summed = [each for name, each in STATE.items() if name in "wvm"]
    read = sum(each.nbytes for name, each in STATE.items() if name in "st")
    sums = sum(row_sums(each.nbytes) + each.nbytes % ROW for each in summed)
    total = sum(each.nbytes for each in STATE.values())
    own_of_all = 0
    for part in range(parts):
        paths, done = [tmp_path / f"{kind}{part}" for kind in "hd"], []
        for path in paths:
            path.touch()
        written = write_quick(paths[0], host, part, parts, lambda _: None)
        far.copied = 0
        assert write_quick(paths[1], device, part, parts, done.append) == written
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert sum(done) == total
        own = far.copied - sums - read  # of those that were summed up
        assert 0 <= own <= written.nbytes
        own_of_all += own
    assert own_of_all == sum(each.nbytes for each in summed)
    assert far.made == []
    assert far.elsewhere == []


@pytest.mark.parametrize("parts", [1, 3])
def test_a_dump_to_disk_reads_the_own_part_alone(far, side, tmp_path, parts):
    state = {"w": STATE["w"], "m": STATE["m"], "b": noise((64 << 10,), torch.float32, 9)}
    host, device = of_host(state), of_device(far, side, state)
    read = 0
    for part in range(parts):
        far.copied = 0
        done = shard.write(tmp_path / "device", device, part, parts, lambda _: None)
        read += far.copied
        assert done.digest == quick_digest(host) == shard.digest(device, lambda _: None)
        expected = shard.write(tmp_path / "host", host, part, parts, lambda _: None)
        assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()
        assert (done.nbytes, done.sha256) == (expected.nbytes, expected.sha256)
        assert expected.digest == shard.digest(host, lambda _: None) != done.digest
    sums = sum(row_sums(each.nbytes) + each.nbytes % ROW for each in state.values())
    assert read == sum(each.nbytes for each in state.values()) + parts * sums
    assert far.elsewhere == []


def test_page_locked_buffers_are_used_and_come_back(far, side):
    access = far.access(side)
    tensor = far.tensor(noise((3 * PIECE + 9,), torch.uint8))
    held = list(Reader(access).pieces(tensor))
    assert b"".join(held) == bits(tensor)[2]
    assert side.idle.empty()
    del held
    assert side.idle.qsize() == 4
    few = far.side(LARGE, buffers=1, most_bytes=PART)
    held = list(Reader(far.access(few)).pieces(tensor))  # others are made
    assert b"".join(held) == bits(tensor)[2]
    del held
    assert few.idle.qsize() == 1


# --- a device that does not do it -----------------------------------------------------------------


def test_no_more_rows_at_once_than_before(far):
    small = far.side(noise((40 * ROW + 8,), torch.uint8), most_bytes=PART)
    assert small.most_rows == 40
    rows = []
    sums = small.sums
    small.sums = lambda table: rows.append(len(table)) or sums(table)
    tensors = named(LARGE)
    assert quick_digest(of_device(far, small, tensors)) == quick_digest(of_host(tensors))
    assert rows == [40, 40, 20]


def test_memory_for_sums_is_the_limit_too(far):
    assert far.side(noise((2 * PART,), torch.uint8), most_bytes=PART).most_rows == PART // ROW


def test_a_device_that_sums_up_nothing_beside_what_hangs_is_read(far, side, monkeypatch, caplog):
    streams = []
    monkeypatch.setattr(torch, "Stream", lambda _: streams.append(FarOther()) or streams[-1])
    tensors = named(LARGE, LARGE[:SMALL])
    far.is_stuck = True
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.copied == sum(each.nbytes for each in tensors.values())
    assert len(streams) == 1  # not the one that is stuck
    assert len(streams[0].waited) == 1
    assert side.is_stuck
    assert caplog.text.count("cuda:0 does nothing beside other work: it is read whole") == 1
    far.summed, far.is_stuck = 0, False
    assert not side.is_stuck
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.summed > 0


def test_a_device_that_stops_in_the_middle_is_read_from_there(far, side, monkeypatch):
    monkeypatch.setattr(torch, "Stream", lambda _: FarOther())
    tensors, done = named(noise((3 * PART + 5,), torch.uint8)), []

    def advance(nbytes):
        done.append(nbytes)
        far.is_stuck = True

    found = quick_digest(of_device(far, side, tensors), advance)
    assert found == quick_digest(of_host(tensors))
    assert done[0] == PART
    assert sum(done) == 3 * PART + 5
    assert far.copied == row_sums(PART) + 2 * PART + 5


def test_a_commit_that_the_device_has_yet_to_pass_is_waited_for_elsewhere(far, side, monkeypatch):
    streams = []
    monkeypatch.setattr(torch, "Stream", lambda _: streams.append(FarOther()) or streams[-1])
    far.has_passed = False
    tensors = named(LARGE)
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.summed == 0
    assert [len(each.waited) for each in streams] == [1]


def test_another_thread_that_holds_the_memory_for_sums_is_not_waited_for(far, side):
    tensors = named(LARGE)
    side._lock.acquire()
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.summed == 0
    side._lock.release()
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))
    assert far.summed > 0


def test_sums_stay_what_they_are(far, side):
    table, other = far.tensor(torch.ones(3, 257).long()), far.tensor(torch.zeros(3, 257).long())
    sums = side.sums(table)
    side.sums(other)
    assert sums.tolist() == [257] * 3 + [3] * 257


def test_two_threads_do_not_disturb_each_other(far, side):
    states = [named(noise((4 * PART,), torch.uint8, seed)) for seed in range(2)]
    wanted, found = [quick_digest(of_host(each)) for each in states], [[], []]

    def digest(place):
        for _ in range(20):
            found[place].append(quick_digest(of_device(far, side, states[place])))

    threads = [threading.Thread(target=digest, args=(place,)) for place in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [set(each) for each in found] == [{each} for each in wanted]


@pytest.mark.parametrize("is_commit_passed", [True, False])
def test_an_error_of_the_device_is_a_failure(far, side, tmp_path, is_commit_passed):
    far.has_passed = is_commit_passed
    state = of_device(far, side, named(LARGE))
    far.error = "CUDA error: unspecified launch failure"
    path = tmp_path / "x"
    path.touch()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        quick_digest(state)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        write_quick(path, state, 0, 2, lambda _: None)


def test_who_gives_up_is_obeyed(far, side):
    def advance(_):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        quick_digest(of_device(far, side, named(LARGE)), advance)
    tensors = named(LARGE)
    assert quick_digest(of_device(far, side, tensors)) == quick_digest(of_host(tensors))


class FarOther:
    """A stream that was made later."""

    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


class Elsewhere(FarTensor):
    """One that keeps its elements elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing is to be done with it")


# --- made while training begins -------------------------------------------------------------------


@pytest.fixture
def torchs(monkeypatch, far):
    """Torch with this device."""
    empty = torch.empty

    def made(*args, device, pin_memory=False, **more):
        assert not torch.is_inference_mode_enabled()
        if pin_memory and not torchs_locked[0]:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        found = empty(*args, device="cpu", **more)
        return far.tensor(found) if device == PLACE else found

    torchs_locked = [True]
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch, "Stream", lambda _: FarStream(far))
    monkeypatch.setattr(torch, "Event", lambda _: FarEvent(far))
    return torchs_locked


@pytest.mark.parametrize("is_locked", [True, False])
def test_side_streams_are_ready_for_what_is_there(far, torchs, is_locked):
    torchs[0] = is_locked
    tensors = named(noise((9,), torch.float32), LARGE, noise((64, 300), torch.float64).t())
    with torch.inference_mode():
        found = side_streams([*map(far.tensor, tensors.values()), LARGE, LARGE.to("meta")])
    assert list(found) == [PLACE]
    side = found[PLACE]
    assert side.most_rows == PART // ROW
    assert side._sums.nbytes < 1 << 20
    assert side.idle.qsize() == 4 * is_locked
    far.made.clear()
    far.copied = 0
    state = Replica({name: far.tensor(each) for name, each in tensors.items()}, (), "{}", {})
    state = state._replace(access=far.access(side))
    assert quick_digest(state) == quick_digest(of_host(tensors))
    assert far.copied < LARGE.nbytes
    assert far.made == []


def test_on_the_host_there_are_none():
    assert side_streams([LARGE, noise((5,), torch.float32), LARGE.to("meta")]) == {}


@pytest.mark.usefixtures("torchs")
def test_there_is_none_for_what_cannot_be_summed_up(far, caplog):
    assert side_streams([far.tensor(LARGE[:9])]) == {}
    assert side_streams([far.tensor(LARGE).as_subclass(Elsewhere)]) == {}
    assert caplog.text == ""
    far.is_stuck = True
    assert side_streams([far.tensor(LARGE)]) == {}
    assert "cuda:0 is read as a whole for its digests: it did not sum up 100 rows" in caplog.text
    far.is_stuck, far.error = False, "no kernel for int64"
    assert side_streams([far.tensor(LARGE)]) == {}
    assert "no kernel for int64" in caplog.text


def test_the_hosts_tensors_know_of_no_side_stream(far, side):
    reader = Reader(far.access(side))
    assert not is_summed_there(LARGE, reader)
    assert is_summed_there(far.tensor(LARGE), reader)
    assert not is_summed_there(far.tensor(LARGE[: SMALL - 1]), reader)
    found, other = FastDigest([LARGE.nbytes]), FastDigest([LARGE.nbytes])
    add_tensor(found, LARGE, reader, lambda _: None)
    add_tensor(other, far.tensor(LARGE), reader, lambda _: None)
    assert found.digest("") == other.digest("")
    assert far.summed > 0


def test_the_main_thread_waits_for_what_it_has_queued(far, side, monkeypatch):
    waited = []

    class Current:
        def synchronize(self):
            waited.append(far.summed)

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Current())
    state = of_device(far, side, named(LARGE))._replace(access=DeviceAccess((), {PLACE: side}))
    assert quick_digest(state) == quick_digest(of_host(named(LARGE)))
    assert waited == [0]
