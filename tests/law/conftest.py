"""One thread, no window, and the same weights in every run."""

import os

# Before torch is imported, and inherited by the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
