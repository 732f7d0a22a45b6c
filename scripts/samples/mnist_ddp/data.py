"""Handwritten digits: MNIST from ``DATA_PATH``, else the real ones inside scikit-learn.

Only the standard library, numpy and torch are imported, so that starting eight ranks stays cheap.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

SIDE = 28
SPLIT_SEED = 0
TEST_SHARE = 5  # one digit of five is kept for the test
MAGIC = struct.Struct(">4B")  # 0, 0, type of the values, number of dimensions
UNSIGNED_BYTES = bytes((0, 0, 8))
IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class DataError(Exception):
    """The data cannot be read; the message names them and says what to do."""


def load() -> tuple[TensorDataset, TensorDataset, str]:
    """Train set, test set (images ``[1, 28, 28]`` in 0..1, labels) and where they come from.

    Raises:
        DataError: files are missing or damaged.
    """
    folder = os.environ.get("DATA_PATH")
    if folder:
        return mnist(Path(folder), "train"), mnist(Path(folder), "test"), f"MNIST in {folder}"
    train, test = bundled_digits()
    return train, test, "scikit-learn's bundled digits"


def bundled_digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 scanned digits of 8x8, resized; split by a fixed shuffle.

    The file is read without importing scikit-learn: ``load_digits()`` takes 0.8-1.1 s in every
    rank, nearly all of it imports, and this takes 0.007 s.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "no data: pip install scikit-learn, or set DATA_PATH to a folder with MNIST's IDX files"
        )
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): reinstall scikit-learn") from error
    small, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    images = interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[: len(order) // TEST_SHARE], order[len(order) // TEST_SHARE :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def mnist(folder: Path, part: str) -> TensorDataset:
    """MNIST's ``train`` or ``test`` part; its files are in the folder or in a subfolder."""
    names = IDX[part]
    # MindSpore's examples set DATA_PATH to .../train; the test files are in a folder beside it
    rooms = (folder, folder / part, folder.parent / part)
    images, labels = (idx(named(rooms, name)) for name in names)
    if images.shape[1:] != (SIDE, SIDE) or images.shape[:1] != labels.shape:
        raise DataError(
            f"{names[0]} {tuple(images.shape)} and {names[1]} {tuple(labels.shape)} in {folder} "
            "do not belong together: download both again"
        )
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def named(rooms: tuple[Path, ...], name: str) -> Path:
    """Find the first file of that name, plain or gzipped."""
    for path in (room / f"{name}{end}" for room in rooms for end in ("", ".gz")):
        if path.is_file():
            return path
    raise DataError(
        f"{name} (or {name}.gz) is not in DATA_PATH={rooms[0]}: put MNIST's four IDX files there, "
        "or unset DATA_PATH to train on scikit-learn's bundled digits"
    )


def idx(path: Path) -> torch.Tensor:
    """Unsigned bytes of an IDX file: the magic, each dimension's size, the values."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again") from error
    if not content.startswith(UNSIGNED_BYTES) or len(content) < MAGIC.size:
        raise DataError(f"{path} is not an IDX file of bytes: download it again")
    sizes = struct.Struct(f">{content[MAGIC.size - 1]}I")
    start = MAGIC.size + sizes.size
    shape = sizes.unpack_from(content, MAGIC.size) if len(content) > start else (0,)
    if not math.prod(shape) or len(content) != start + math.prod(shape):
        raise DataError(f"{path} has the wrong length, {len(content)} bytes: download it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)
