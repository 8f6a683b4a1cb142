"""Processes of one machine meet on its loopback, others at the address that was asked for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from audit import listeners
from graph_runs import make_task
from hdnn.app import cli
from hdnn.distributed import Gloo, launch
from hdnn.training.processes import meeting

pytestmark = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and dist.is_gloo_available()),
    reason="needs Linux and gloo",
)

LIMIT = 300  # seconds, on a very busy machine
ALONE = {"127.0.0.1", "::1"}
WAIT = timedelta(seconds=20)

# What `hdnn train` does when torchrun, or somebody's own script, has started it.
JOINED = """
import json, os
from audit import listeners
from hdnn.training.processes import torchrun

with torchrun.joined() as processes:
    processes.device("cpu")
    print(json.dumps(sorted(listeners(os.getpid()))), flush=True)
os._exit(0)  # to clear the memory takes longer than all the rest
"""

# The same for the parts of a graph.
CONNECTED = """
import json, os
import torch
from audit import listeners
from hdnn.distributed import connect

transport = connect(timeout=60).transport
other, own = 1 - transport.part, torch.ones(3)
transport.exchange([(other, own)], [(other, torch.empty(3))])
print(json.dumps(sorted(listeners(os.getpid()))), flush=True)
transport.exchange([(other, own)], [(other, torch.empty(3))])
os._exit(0)
"""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


@pytest.fixture
def run_pair(stem, tmp_path):
    """Where each of two processes listens that find each other by the environment."""
    processes = []

    def run(program: str, **environment: str) -> list[set[str]]:
        group = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "HDNN_TIMEOUT": "60"}
        for rank in range(2):
            own = environment | group | {"RANK": str(rank), meeting.INTERFACE: None}
            words = tmp_path / f"{rank}"
            processes.append(stem.fork(["-c", program], words, environment=own))
        ends = [process.wait(LIMIT) for process in processes]
        assert [ended.code for ended in ends] == [0, 0], ends
        return [{host for host, _ in json.loads(ended.output)} for ended in ends]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def test_a_launch_listens_on_the_loopback_alone(tmp_path):
    config, found, processes = tmp_path / "config.json", [], []
    config.write_text(make_task(tmp_path, 2).config.text())

    def look(_: object) -> None:
        if found:  # in the first epoch nobody has ended
            return
        found.extend([listeners(os.getpid()), *(listeners(one.pid) for one in processes)])

    before = listeners(os.getpid())
    command = [sys.executable, "-m", "hdnn.distributed.worker", str(config)]
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}  # of somebody who has several machines
    ended = launch(2, command, started=processes.extend, show=look, environment=environment)
    assert ended.code == 0, ended.fault
    assert all(found)  # the store, and each part
    assert {host for one in found for host, _ in one - before} <= ALONE


@pytest.mark.slow
@pytest.mark.parametrize("program", [JOINED, CONNECTED], ids=["training", "graph"])
def test_processes_of_one_machine_listen_on_the_loopback_alone(run_pair, program):
    port = str(free_port())
    for hosts in run_pair(program, MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
        assert hosts
        assert hosts <= ALONE


@pytest.mark.slow
@pytest.mark.parametrize("program", [JOINED, CONNECTED], ids=["training", "graph"])
def test_rank_0_keeps_the_store_at_the_address_that_was_asked_for(run_pair, program):
    asked = "127.0.0.2"  # stands for one of several addresses of a machine
    port = str(free_port(asked))
    first, _ = run_pair(program, MASTER_ADDR=asked, MASTER_PORT=port)
    assert asked in first
    assert not first & {"0.0.0.0", "::"}


def test_a_store_listens_at_one_address():
    before = listeners(os.getpid())
    store = meeting.serve("127.0.0.2", timeout=WAIT, wait_for_workers=False)
    assert listeners(os.getpid()) - before == {("127.0.0.2", store.port)}
    client = meeting.TCPStore("127.0.0.2", store.port, is_master=False, timeout=WAIT)
    client.set("word", "heard")
    assert store.get("word") == b"heard"


def test_a_process_that_keeps_a_store_may_ask_for_it_again():
    port = free_port()
    first, second = (meeting.serve("127.0.0.1", port, timeout=WAIT, world_size=1) for _ in "ab")
    first.set("word", "heard")
    assert second.get("word") == b"heard"


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid", "x" * 300])
def test_a_store_at_an_address_of_others_is_one_sentence(host):
    with pytest.raises(meeting.MeetingError, match="give an address of this machine") as error:
        meeting.serve(host, 29500)
    assert len(str(error.value)) < 300


def test_a_store_that_other_machines_could_not_reach_is_refused(monkeypatch):
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(meeting.MeetingError, match="localhost is the loopback here"):
        meeting.from_environment(0, 4, 1.0)


@pytest.mark.parametrize(("host", "port"), [("", "1"), ("a", ""), ("a", "-1"), ("a", "9" * 400)])
def test_an_environment_without_an_address_is_one_sentence(host, port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(meeting.MeetingError, match="MASTER_ADDR and MASTER_PORT must be"):
        meeting.from_environment(1, 2, 1.0)


@pytest.mark.parametrize(
    ("environment", "one"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, False),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1"}, False),
        ({"WORLD_SIZE": "4"}, False),
    ],
)
def test_it_is_known_whether_all_processes_are_on_one_machine(environment, one, monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert meeting.on_one_machine() is one


def test_what_the_user_says_of_gloo_is_kept(monkeypatch):
    monkeypatch.setenv(meeting.INTERFACE, "eth7")
    with meeting.kept_here(True):
        assert os.environ[meeting.INTERFACE] == "eth7"
    monkeypatch.delenv(meeting.INTERFACE)
    with meeting.kept_here(True):
        assert os.environ[meeting.INTERFACE] == "lo"
    with meeting.kept_here(False):
        assert meeting.INTERFACE not in os.environ


def test_a_group_of_gloo_writes_no_variables_of_the_environment_that_threads_share(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a variable of the environment was written")

    with monkeypatch.context() as inside:  # pytest writes one itself when a test ends
        inside.setattr(os, "putenv", refuse)
        inside.setattr(os, "unsetenv", refuse)
        for lazy in (False, True):
            group = meeting.gloo_group(dist.HashStore(), 0, 1, 5.0, lazy=lazy)
            assert (group.rank(), group.size()) == (0, 1)
        Gloo(0, 1, dist.HashStore(), timeout=5.0).close()


def test_a_group_of_gloo_listens_where_the_user_says(monkeypatch):
    monkeypatch.setenv(meeting.INTERFACE, "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        meeting.gloo_group(dist.HashStore(), 0, 1, 5.0)


# A machine that cannot talk to itself


def test_a_launch_without_a_loopback_is_one_sentence(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meeting.socket, "create_server", refuse)
    assert cli.main(["launch", "--nodes", "2"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1 cannot be used here (Cannot assign requested address)" in said
    assert not [*tmp_path.iterdir()]


def test_a_launch_in_a_namespace_without_a_loopback_ends_at_once(tmp_path):
    apart = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    command = [sys.executable, "-m", "hdnn", "launch", "--nodes", "2", "--epochs", "1"]
    begin = time.monotonic()
    ended = subprocess.run(
        [*apart, *command], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert time.monotonic() - begin < 60  # most of which is to import PyTorch
    assert (ended.returncode, ended.stdout) == (2, "")
    (said,) = ended.stderr.splitlines()
    assert said.startswith("hdnn: processes of one machine talk by its loopback")
    assert not [*tmp_path.iterdir()]
