"""Real processes: the same numbers as one process, neighbours only, and clear ends after faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hdnn import io
from hdnn.distributed import Graph, LostError, Messages, Plan, launch, train
from hdnn.errors import OptionError

HERE = Path(__file__).parent
RANDOM = [
    [0, 3],
    [3, 5],
    [5, 1],
    [1, 7],
    [7, 2],
    [2, 6],
    [6, 4],
    [0, 6],
    [3, 7],
]
GRAPHS = {
    "ring": Graph.ring(8),
    "random": Graph(8, R=RANDOM, sizes=[1, 2, 1, 1, 3, 1, 2, 1]),
}
SHORT = {"layers": 2, "batch": 500, "dtype": "float64"}

TRAIN = """
import os, torch
from hdnn.distributed import Graph, train
from hdnn.errors import HDNNError
torch.set_num_threads(1)
tell = lambda news: print(news["epoch"], flush=True)
try:
    train(Graph.ring(3), "double_moons", batch=1000, layers=2, tell=tell, {})
except HDNNError as error:
    print(type(error).__name__, error, flush=True)
    os._exit(1)
"""


@pytest.fixture
def start():
    """Starts one of so many processes by hand, without torchrun; none outlives its test."""
    started = []

    def begin(*arguments, **more):
        started.append(_start(*arguments, **more))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _start(arguments: list[str], size: int, port: int, rank: int, **more: str):
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    variables |= {
        "PYTHONPATH": str(HERE.parents[1] / "src"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **variables, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return place.getsockname()[1]


def ended(process: subprocess.Popen[str], seconds: float = 150) -> str:
    """The output of a process that must end by itself in time."""
    return process.communicate(timeout=seconds)[0]


@pytest.mark.parametrize(("kind", "size"), [("ring", 8), ("random", 4)])
def test_gradients_equal_those_of_one_network_and_go_to_neighbours_only(
    kind, size, start
):
    port = free_port()
    table = json.dumps(GRAPHS[kind].table())
    command = [str(HERE / "worker.py")]
    processes = [
        start(command, size, port, rank, GRAPH=table) for rank in range(size)
    ]
    for output in [ended(process) for process in processes]:
        assert "worst" in output, output
        assert float(output.split()[-1]) < 1e-12


@pytest.mark.parametrize(
    ("kind", "size"), [("random", 8), ("ring", 4), ("ring", 2)]
)
def test_trained_weights_equal_those_of_one_process(kind, size, tmp_path):
    options = {**SHORT, "epochs": 2, "gather": True}
    alone = train(GRAPHS[kind], "double_moons", **options)
    several = launch(
        GRAPHS[kind],
        "double_moons",
        processes=size,
        folder=str(tmp_path / "run"),
        **options,
    )
    losses = torch.tensor(
        [alone["history"]["loss"], several["history"]["loss"]]
    )
    assert (losses[0] - losses[1]).abs().max() < 1e-12
    weights = alone["model"].net.state_dict()
    for name, weight in (
        io.load(tmp_path / "run" / "model.safetensors").net.state_dict().items()
    ):
        assert (weight - weights[name]).abs().max() < 1e-12, name
    linked = Plan(GRAPHS[kind], [0] * 8).graph.used
    if size == 8:  # one process a node: who talked to whom?
        pairs = {(i, k) for i, k, *_ in several["traffic"]}
        assert pairs == {
            (i, k) for i, row in enumerate(linked) for k in row if k != i
        }


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if (
                int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                == pid
            ):
                found.append(int(entry.name))
    return found


class Killer:
    """Kills the worker of node 1 after the second epoch, once."""

    def __init__(self) -> None:
        self.killed = 0.0

    def __call__(self, news: dict) -> None:
        if news["epoch"] == 2 and not self.killed:
            [agent] = [
                pid for pid in children(os.getpid()) if len(children(pid)) >= 3
            ]
            for pid in children(agent):
                with contextlib.suppress(OSError):
                    variables = (
                        Path(f"/proc/{pid}/environ").read_text().split("\0")
                    )
                    if "RANK=1" in variables:
                        os.kill(pid, signal.SIGKILL)
                        self.killed = time.monotonic()


def test_a_launch_is_restarted_after_a_kill_to_the_same_bits(
    tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text(
        "raise SystemExit('imported from the current folder')"
    )
    monkeypatch.chdir(tmp_path)
    options = {**SHORT, "epochs": 4, "gather": True}
    killer = Killer()
    metrics = launch(
        Graph.ring(3),
        "double_moons",
        folder="run",
        restarts=1,
        tell=killer,
        **options,
    )
    assert killer.killed
    assert metrics["epochs"] == 4
    once = launch(Graph.ring(3), "double_moons", folder="once", **options)
    assert metrics["history"] == once["history"]
    first, second = (
        io.load(f"{name}/model.safetensors").state_dict()
        for name in ("run", "once")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_launch_names_the_node_that_was_killed():
    killer = Killer()
    with pytest.raises(
        LostError, match=r"node 1 (was killed by signal 9|is gone)"
    ):
        launch(
            Graph.ring(3), "double_moons", tell=killer, epochs=10_000, **SHORT
        )
    assert time.monotonic() - killer.killed < 30


def test_a_launch_passes_on_the_sentence_of_a_mistake(tmp_path):
    with pytest.raises(
        OptionError, match=r"neither one of .* nor a folder of node files"
    ):
        launch(Graph.ring(2), str(tmp_path / "nothing"))


def test_the_others_end_soon_after_one_is_killed_and_all_name_it(start):
    # The store is here, as torchrun keeps it: in process 0 it would be gone before process 2 asks.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    outside = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    program = ["-c", TRAIN.format("epochs=100_000, timeout=20")]
    processes = [
        start(program, 3, store.port, rank, **outside) for rank in range(3)
    ]
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline().strip() == "1"
    processes[1].kill()
    killed = time.monotonic()
    for rank in (0, 2):
        assert "LostError training stopped because node 1 is gone" in ended(
            processes[rank]
        )
    assert time.monotonic() - killed < 20


@pytest.mark.parametrize("seconds", [2, 100])
def test_a_listener_that_never_answers_does_not_outlast_timeout_or_sigterm(
    start, seconds
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        program = ["-c", TRAIN.format(f"epochs=1, timeout={seconds}")]
        process = start(program, 2, port, 1)
        client, _ = silent.accept()
        begin = time.monotonic()
        if seconds == 100:
            process.terminate()
        output = ended(process)
        client.close()
    if seconds == 2:
        assert "LostError rendezvous of 2 processes at 127.0.0.1:" in output
    assert time.monotonic() - begin < 30


def test_a_script_that_does_not_catch_the_error_of_a_silent_listener_ends(
    start,
):
    program = """
from hdnn.distributed import Graph, train
train(Graph.ring(2), "double_moons", timeout=2)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start(["-c", program], 2, silent.getsockname()[1], 1)
        client, _ = silent.accept()
        begin = time.monotonic()
        output = ended(process)
        client.close()
    assert "LostError: rendezvous of 2 processes" in output
    assert time.monotonic() - begin < 30


def test_processes_of_different_trainings_say_what_differs(start):
    port = free_port()
    options = ["epochs=1", "epochs=1, step=0.3"]
    processes = []
    for rank, text in enumerate(options):
        processes.append(start(["-c", TRAIN.format(text)], 2, port, rank))
    for process in processes:
        assert "differ in network" in ended(process)


@pytest.mark.parametrize(
    "entry",
    ["", "{", "[1, 2]", '{"graph": 3}', "[" * 100_000],
    ids=["empty", "cut", "list", "number", "deep"],
)
def test_a_malformed_entry_of_the_store_is_a_sentence(entry):
    plan = Plan(Graph.ring(2), [0, 1], rank=0)
    store = dist.HashStore()
    store.set("facts-1", entry)
    store.set("read-1", "")
    with pytest.raises(OptionError, match="node 1 and node 0 differ in graph"):
        Messages(plan, store, timeout=5.0).agree({"graph": "a"})
