"""What every test shares: one thread, no window, examples that repeat, CUDA tests where CUDA is."""

import os
import signal
import sys

# Before torch is imported, and inherited by the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Started in the background of a shell, Python would not hear Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tensors of the tests are small, and the test processes already fill the cores.
torch.set_num_threads(1)

# Time limits would only measure how busy the machine is.
settings.register_profile(
    "explore",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
# The same few in every run of all tests; whoever runs some of them explores further.
settings.register_profile(
    "reproducible",
    settings.get_profile("explore"),
    max_examples=20,
    derandomize=True,
    database=None,
)
settings.load_profile(
    "reproducible" if os.environ.get("CI") == "true" else "explore"
)


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    """Weights drawn without a seed are the same in every run: rare draws end in worse optima."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is as wide as it is: pytest's own processes say how wide a terminal they would like."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
