"""Large buffers are used again, but never while a tensor holds them."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from hdnn.engine.kernels import lent

SIZE = lent.LARGE // 4 + 3


@pytest.fixture(autouse=True)
def nothing_free(monkeypatch):
    monkeypatch.setattr(lent, "_free", deque())


def test_a_large_buffer_is_lent_again_when_no_tensor_holds_it():
    first = lent.empty(SIZE, torch.float32)
    assert first.shape == (SIZE,)
    assert first.dtype == torch.float32
    place, piece = first.data_ptr(), first[5:7]
    del first
    second = lent.empty(SIZE, torch.float32)
    assert second.data_ptr() != place  # a piece of it is still in use
    piece.fill_(3.0)
    del piece
    third = lent.empty(SIZE // 2, torch.float64)
    assert third.data_ptr() == place
    third.fill_(1.0)
    assert not lent._free


def test_a_saved_tensor_holds_its_buffer():
    x = torch.ones((), requires_grad=True)
    kept = lent.empty(SIZE, torch.float32).fill_(2.0)
    loss = (x * kept).sum()
    del kept
    other = lent.empty(SIZE, torch.float32).fill_(7.0)
    loss.backward()
    assert x.grad is not None
    assert float(x.grad) == pytest.approx(2 * SIZE, rel=1e-5)
    del other


def test_other_sizes_and_small_buffers_are_new(monkeypatch):
    del_later = lent.empty(SIZE, torch.float32)
    del del_later
    assert len(lent._free) == 1
    lent.empty(8, torch.float32)
    large = lent.empty(5 * SIZE, torch.float32)
    assert len(lent._free) == 1
    monkeypatch.setattr(lent, "_most", 4.0 * SIZE)
    del large  # more than is kept for later, and so is what was there before
    assert not lent._free


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        small, large = lent.empty(8, torch.float32), lent.empty(SIZE, torch.float32)
    assert small.is_cpu
    assert large.is_cpu


def test_buffers_may_come_back_while_one_comes_back(monkeypatch):
    class Changing(deque):
        reads = 0

        def __iter__(self):
            Changing.reads += 1
            if Changing.reads == 1:
                raise RuntimeError("deque mutated during iteration")
            return super().__iter__()

    monkeypatch.setattr(lent, "_free", Changing())
    monkeypatch.setattr(lent, "_most", 0.0)
    lent._give_back(torch.empty(5, dtype=torch.uint8))
    assert not lent._free
