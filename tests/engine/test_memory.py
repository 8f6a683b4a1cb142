"""Large buffers are used again once nobody holds them; the memory of a process is its cgroup's."""

from __future__ import annotations

import pytest
import torch

from hdnn.engine import cpu
from hdnn.engine.memory import process_bytes


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


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/jobs/mine", {"jobs/mine/memory.max": 5000}, 5000),
        (
            "0::/jobs/mine",
            {"jobs/mine/memory.max": "max", "jobs/memory.max": 7000},
            7000,
        ),
        ("0::/", {"memory.max": 3000}, 3000),
        ("0::/of/the/host", {"memory.max": 3000}, 3000),
        (
            "5:cpu,memory:/mine\n0::/",
            {"memory/mine/memory.limit_in_bytes": 4000},
            4000,
        ),
        (
            "5:cpu:/mine\n0::/",
            {"memory/mine/memory.limit_in_bytes": 4000},
            None,
        ),
        ("0::/mine", {"other/memory.max": 1}, None),
    ],
)
def test_the_limit_of_the_own_group_or_of_one_above_counts(
    tmp_path, groups, files, expected
):
    machine = process_bytes(tmp_path)  # no such files: the whole machine
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, limit in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert process_bytes(tmp_path) == (expected or machine)
