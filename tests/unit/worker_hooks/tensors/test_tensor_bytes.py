"""What tensors' bytes are called, and back."""

import pytest
import torch
from support.tensors import bits, everything

from worker_hooks.contract.status_page import Entry
from worker_hooks.tensors.tensor_bytes import (
    dtype_name,
    entry_of,
    from_bytes,
    to_bytes,
    torch_dtype,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_tensor_is_made_of_its_bytes_again():
    for name, tensor in everything().items():
        entry = entry_of(name, tensor)
        assert entry.nbytes == len(to_bytes(tensor)) == tensor.nbytes
        assert bits(from_bytes(entry, bytes(to_bytes(tensor)))) == bits(tensor)
        assert torch_dtype(dtype_name(tensor.dtype)) is tensor.dtype
    odd = torch.arange(6).reshape(2, 3).t()
    assert bits(from_bytes(entry_of("odd", odd), to_bytes(odd))) == bits(odd)


def test_bytes_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="cannot be made of 3 bytes"):
        from_bytes(Entry("a", "U8", (4,), 4), b"123")
    with pytest.raises(TypeError, match="no type for elements of type F6_E2M3"):
        torch_dtype("F6_E2M3")
    with pytest.raises(TypeError, match=r"torch\.bits8 cannot be saved"):
        dtype_name(torch.bits8)
