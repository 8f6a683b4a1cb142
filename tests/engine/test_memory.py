"""Large buffers are used again once nobody holds them."""

from __future__ import annotations

import torch

from hdnn.engine import cpu


def test_a_large_buffer_is_used_again_when_no_tensor_needs_it():
    first = cpu.buffer(2**20, torch.float32)
    view = first[5:10]
    address = first.data_ptr()
    del first
    assert (
        cpu.buffer(2**20, torch.float32).data_ptr() != address
    )  # the view holds it
    del view
    assert cpu.buffer(2**20, torch.float32).data_ptr() == address


def test_buffers_have_the_size_and_dtype_that_was_asked_for():
    for count in (0, 3, 2**18, 2**20 + 7):
        for dtype in (torch.float32, torch.float64):
            buffer = cpu.buffer(count, dtype)
            assert buffer.shape == (count,)
            assert buffer.dtype == dtype
            buffer.fill_(1.0)
