"""Memory of an accelerator, played by the host's: a double that counts. Not a test.

It counts the bytes that are copied to the host, and the memory that is made there. Its tensors say
that they are on CUDA device 0, where torch for the CPU can make none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from worker_hooks.device.side_stream import DeviceAccess, SideStream
from worker_hooks.tensors import device_digest, reader, shard

PLACE = torch.device("cuda", 0)


class FarTensor(torch.Tensor):
    """A tensor there; so is whatever is made of it, but for what is copied into a host's tensor."""

    far: FarDevice

    @property
    def device(self):
        return PLACE

    def __deepcopy__(self, memo):
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            far = next(each.far for each in args if isinstance(each, FarTensor))
            far.note(func, args, kwargs, result)
        return result


@dataclass
class FarDevice:
    """The device: its memory, its streams and its moods."""

    copied: int = 0  # bytes, to the host
    made: list[str] = field(default_factory=list)  # by which functions memory was made
    summed: int = 0  # bytes
    error: str = ""  # sticky
    is_stuck: bool = False  # does nothing that is queued
    has_passed: bool = True  # what must precede reading
    on_side: bool = False  # the current stream is the side stream
    elsewhere: list[str] = field(default_factory=list)  # what was queued on another stream

    def tensor(self, tensor: torch.Tensor) -> FarTensor:
        found = tensor.detach().as_subclass(FarTensor)
        found.far = self
        return found

    def note(self, func, args, kwargs, result) -> None:
        name = getattr(func, "__name__", str(func))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, FarTensor):
                each.far = self
                known = {one.untyped_storage().data_ptr() for one in (*args, *kwargs.values())
                         if isinstance(one, torch.Tensor)}  # fmt: skip
                if each.nbytes and each.untyped_storage().data_ptr() not in known:
                    self.made.append(name)
        is_work = name in {"copy_", "sum"}
        if is_work and self.error:
            raise RuntimeError(self.error)
        if is_work and not self.on_side:
            self.elsewhere.append(name)
        if name == "copy_" and not isinstance(args[0], FarTensor):
            self.copied += args[0].nbytes
        if name == "sum":
            self.summed += args[0].nbytes

    def side(self, *like: torch.Tensor, buffers: int = 4, most_bytes: int = 64 << 20) -> SideStream:
        """A side stream, warmed with the largest of these."""
        words = most_bytes // 8 // 257 + 257
        found = SideStream(
            FarStream(self),
            FarEvent(self),
            self.tensor(torch.zeros(words, dtype=torch.int64)),
            torch.zeros(words, dtype=torch.int64),
            [memoryview(bytearray(reader.PIECE)) for _ in range(buffers)],
        )
        tables = [device_digest._table_if_any(self.tensor(each)) for each in like]
        found.warm(max((each for each in tables if each is not None), key=len))
        self.copied = self.summed = 0
        self.made.clear()
        return found

    def access(self, side: SideStream) -> DeviceAccess:
        return DeviceAccess((FarEvent(self, is_commit=True),), {PLACE: side})


@dataclass
class FarStream:
    far: FarDevice

    def __enter__(self):
        self.far.on_side = True

    def __exit__(self, *_):
        self.far.on_side = False


@dataclass
class FarEvent:
    far: FarDevice
    is_commit: bool = False
    device = PLACE

    def record(self, _stream):
        pass

    def query(self):
        if self.far.error:
            raise RuntimeError(self.far.error)
        return self.far.has_passed if self.is_commit else not self.far.is_stuck


def stay_far(monkeypatch) -> None:
    """Tensors stay what they are when their autograd history and their class are taken off."""
    for module in (device_digest, reader, shard):
        bare = module.plain
        monkeypatch.setattr(
            module,
            "plain",
            lambda each, bare=bare: each.detach() if isinstance(each, FarTensor) else bare(each),
        )
