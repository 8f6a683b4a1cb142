"""Faults of single parts: all others stop and say why, and a restart ends as if nothing was."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import graph_runs
from graph_runs import BATCHES, EPOCHS, Fault, Group, Stem, Task, make_task, ring, until, write_data
from hdnn.distributed import Gloo, launch, worker
from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.training.run import train
from hdnn.distributed.training.shards import Shards
from hdnn.errors import DataError
from hdnn.serialization import read

pytestmark = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and dist.is_gloo_available()),
    reason="needs Linux and gloo",
)

NODES = 4  # on a ring: 0, the root, is linked to 1 and 3, and 2 to both of them
SHORT = 3.0  # seconds, as a time-out that is meant to pass
ALL = list(range(1, EPOCHS + 1))  # epochs


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), NODES)


@pytest.fixture
def group(stem, task):
    with Group(stem, task.config, NODES) as group:
        yield group


def finish(stem: Stem, task: Task, home: Path) -> list[int]:
    """Resume to the end, which is that of one process; the epochs that were done again."""
    with Group(stem, task.config, NODES) as group:
        all_ended = group.start_all("--out", str(home), "--resume").end()
    assert [(ended.code, ended.errors) for ended in all_ended] == [(0, "")] * NODES
    assert (home / "model.safetensors").read_bytes() == task.model
    return all_ended[0].epochs


def shards(home: Path) -> list[Path]:
    return sorted(home.glob("nodes/*/step-*.safetensors"))


# Parts that are lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "step", "exchange"),
    [(0, 6, 10), (1, 9, 16), (2, 8, 1)],
    ids=["root while it gathers", "neighbour of the root backward", "leaf forward"],
)
def test_a_killed_part_is_named_by_all_and_a_restart_ends_the_same(
    stem, task, group, tmp_path, victim, step, exchange
):
    home, fault = tmp_path / "out", Fault(signal.SIGKILL, step, exchange)
    all_ended = group.start_all("--out", str(home), odd=victim, fault=fault).end()
    assert all_ended.pop(victim).code == -signal.SIGKILL
    neighbour = rf"( \(node {(victim + 1) % 4} is gone\)| \(node {(victim - 1) % 4} is gone\))?"
    for ended in all_ended:
        said = rf"the training stopped because node {victim} is gone{neighbour}\."
        assert re.fullmatch(said, ended.sentence), ended
        assert ended.code == 1
    assert not (home / "model.safetensors").exists()
    assert finish(stem, task, home) == ALL[step // BATCHES :]


@pytest.mark.slow
def test_a_frozen_part_is_named_by_all_after_the_time_out(stem, task):
    with Group(stem, task.config, NODES, SHORT) as group:
        group.start_all(odd=2, fault=Fault(signal.SIGSTOP, 5, 12))
        *others, frozen = (group.processes[part] for part in (0, 1, 3, 2))
        until(frozen.stopped)
        begin = time.monotonic()
        for process in others:
            ended = process.wait()
            assert ended.code == 1
            assert ended.sentence.startswith(
                "the training stopped because node 2 sent nothing for 3 s"
            )
        assert SHORT - 1 < time.monotonic() - begin < SHORT + 20
        assert frozen.stopped()
        frozen.send(signal.SIGCONT)  # and if it wakes up, it has nobody left
        ended = frozen.wait()
    assert ended.code == 1
    assert ended.sentence.startswith("the training stopped because node 2 sent nothing for 3 s (")


def test_a_part_may_come_late(task, group, tmp_path):
    for part in (0, 1, 3):
        group.start(part, "--out", str(tmp_path))
    until(lambda: group.waiting() == 3)
    group.start(2, "--out", str(tmp_path))
    assert [ended.code for ended in group.end()] == [0] * NODES
    assert (tmp_path / "model.safetensors").read_bytes() == task.model


def test_a_part_that_never_comes_is_named_by_all(stem, task):
    with Group(stem, task.config, NODES, SHORT) as group:
        for part in (0, 1, 3):
            group.start(part)
        for ended in group.end():
            assert ended.code == 1
            assert ended.sentence == (
                "the training did not start because node 2 did not start within 3 s."
            )


def test_a_part_that_is_started_twice_says_so_and_the_others_go_on(task, group, tmp_path):
    for part in (0, 1, 2):
        group.start(part, "--out", str(tmp_path))
    until(lambda: group.waiting() == 3)
    second = group.start(1, "--out", str(tmp_path)).wait()
    assert second.code == 2
    assert second.sentence == "node 1 was started twice; each part is one process."
    group.start(3, "--out", str(tmp_path))
    assert [ended.code for ended in group.end()] == [0, 0, 0, 2, 0]
    assert (tmp_path / "model.safetensors").read_bytes() == task.model


def test_parts_that_blame_each_other_name_the_silence_that_came_first():
    store = dist.HashStore()
    parts = [Gloo(part, 2, store, timeout=SHORT) for part in range(2)]
    # Part 1 has given up on part 0, closing its connections, and only this does part 0 see.
    store.set("lost-1", json.dumps([0, "part 0 sent nothing for 3 s", True]))
    error = parts[0].lost(1, RuntimeError("Connection closed by peer"))
    assert str(error) == (
        "the training stopped because part 0 sent nothing for 3 s (part 1 is gone)."
    )
    error = parts[1].lost(0, RuntimeError("Timed out waiting 3000ms for recv"))
    assert str(error) == "the training stopped because part 0 sent nothing for 3 s."
    for part in parts:
        part.close()


def test_parts_stop_if_the_store_goes_before_all_have_come(group):
    for part in (0, 1, 3):
        group.start(part)
    until(lambda: group.waiting() == 3)
    del group.store
    for ended in group.end():
        assert ended.code == 1
        assert ended.errors.splitlines()[-1].startswith("hdnn: the store is gone")


# Parts that do not fit together


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"options": {"epochs": EPOCHS, "batch": 25}}, "batch size"),
        ({"options": {"epochs": EPOCHS, "batch": 50, "learning_rate": 1}}, "options of training"),
        ({"dtype": "float64"}, "dtype"),
        ({"layers": 3}, "network and another number of layers"),
        ({"network": "verlet"}, "network"),
        ({"graph": {**ring(NODES), "R": [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]}}, "graph"),
        ({"graph": {**ring(NODES), "R": [[0, 1], [1, 2], [3, 0]]}}, "graph"),
        ({"data": "fewer"}, "number of samples"),
        ({"data": "tested"}, "number of test samples"),
        ({"data": "shuffled"}, "order of samples"),
        ({"data": "double_moons"}, "data set"),
        ({"init": "scaled"}, "way to draw initial weights"),
        ({"version": "0.0.9"}, "version of hdnn"),
    ],
)
def test_all_parts_name_what_differs_and_where_before_any_step(stem, task, tmp_path, odd, what):
    config = task.config
    if (kind := odd.get("data")) == "double_moons":
        config = replace(config, data="double_circles")
    elif kind is not None:
        data = tmp_path / kind
        write_data(data, NODES, 199 if kind == "fewer" else 200)
        if kind == "tested":
            shutil.copytree(data / "train", data / "test")
        if kind == "shuffled":
            for file in (data / "train").iterdir():
                _, tensors = read(file)
                save_file({**tensors, "id": torch.arange(200).flip(0)}, file)
        odd = {"data": str(data)}
    home = tmp_path / "out"
    with Group(stem, config, NODES, timeout=10) as group:
        all_ended = group.start_all("--out", str(home), odd=2, **odd).end()
    for ended in all_ended:
        found = re.fullmatch(
            r"the training did not start because node (\d) has another (.*) than node (\d): "
            r"start all parts with the same\.",
            ended.sentence,
        )
        assert found is not None, ended
        assert "2" in found.group(1, 3)
        assert found[2].startswith(what)
        assert ended.code == 2
        assert ended.epochs == []
    assert not shards(home)


def test_replicas_with_different_data_name_each_other(stem, task, tmp_path):
    with Group(stem, replace(task.config, graph=ring(2)), 4, timeout=10) as group:
        write_data(tmp_path / "data", 2, 200)
        write_data(tmp_path / "fewer", 2, 199)
        for part in range(4):
            data = str(tmp_path / ("data" if part < 2 else "fewer"))
            group.start(part, replicas=2, data=data)
        all_ended = group.end()
    for ended in all_ended:
        assert ended.code == 2
        assert re.fullmatch(
            r"the training did not start because node \d of replica (0|1) has another number of "
            r"samples than node \d of replica (?!\1)\d: start all parts with the same\.",
            ended.sentence,
        )


def test_files_of_one_part_with_different_samples_are_named(tmp_path):
    task = make_task(tmp_path, 2)
    for i, numbers in enumerate((torch.arange(200), torch.arange(200).flip(0))):
        file = Path(task.config.data, "train", f"node-{i:05d}.safetensors")
        save_file({**read(file)[1], "id": numbers}, file)
    labels = Path(task.config.data, "train", "labels.safetensors")
    save_file({**read(labels)[1], "id": torch.arange(200)}, labels)
    with pytest.raises(DataError, match=r"node-00001\.safetensors has other samples than"):
        train(task.config, graph_of(task.config.graph))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            {"T": [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]},
            "T must be symmetric, but it links 0 to 1 and not 1 to 0",
        ),
        (
            {"edges": [[0, 1], [1, 2], [2, 3], [3, 0]], "R": [[0, 1], [1, 2]]},
            "nodes would need 0 -> 2, 2 -> 0, which S does not link",
        ),
    ],
    ids=["asymmetric", "not local"],
)
def test_a_graph_that_cannot_be_is_refused_before_parts_talk(
    task, tmp_path, monkeypatch, capsys, graph, message
):
    path = tmp_path / "config.json"
    path.write_text(replace(task.config, graph={**ring(NODES), **graph}).text())
    monkeypatch.setenv("HDNN_PARTS", str(NODES))
    monkeypatch.setenv("HDNN_STORE", "nobody:0")  # nor is there anybody to talk to
    assert worker.main([str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


def test_a_store_that_nobody_keeps_is_one_sentence(task, tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.json"
    path.write_text(task.config.text())
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("HDNN_PARTS", str(NODES))
        monkeypatch.setenv("HDNN_STORE", where)
        assert worker.main([str(path), "--timeout", "0.5"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"hdnn: cannot reach the store {where}")


def test_what_one_part_cannot_read_all_say_at_once(task, group, tmp_path):
    data = shutil.copytree(task.config.data, tmp_path / "data")
    (data / "train" / "node-00002.safetensors").unlink()
    begin = time.monotonic()
    all_ended = group.start_all(odd=2, data=str(data)).end()
    assert time.monotonic() - begin < group.timeout / 2
    for part, ended in enumerate(all_ended):
        assert ended.code == 2
        said = f"{data}/train/node-00002.safetensors does not exist"
        if part != 2:
            said = f"the training did not start because node 2 says: {said}"
        assert ended.sentence.startswith(said)


# Shards


@pytest.fixture(scope="module")
def stopped(stem, task, tmp_path_factory) -> Path:
    """The folder of a training that was killed in its last epoch: three shards a node are left."""
    home = tmp_path_factory.mktemp("stopped") / "out"
    fault = Fault(signal.SIGKILL, BATCHES * (EPOCHS - 1) + 1, 5)
    with Group(stem, task.config, NODES) as group:
        group.start_all("--out", str(home), odd=3, fault=fault).end()
    assert [shard.name for shard in shards(home)] == NODES * [name(e) for e in ALL[-4:-1]]
    return home


@pytest.fixture
def home(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "out")


def name(epoch: int) -> str:
    return f"step-{BATCHES * epoch:010d}.safetensors"


def shard(home: Path, node: int, epoch: int) -> Path:
    return home / "nodes" / f"node-{node:05d}" / name(epoch)


def lose(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the last number
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [lose, truncate, empty, flip])
def test_one_bad_shard_sends_all_nodes_back_to_the_newest_common_step(stem, task, home, damage):
    damage(shard(home, 2, EPOCHS - 1))
    assert finish(stem, task, home) == ALL[-2:]


def test_different_bad_shards_send_all_nodes_back_further(stem, task, home):
    lose(shard(home, 1, EPOCHS - 1))
    flip(shard(home, 2, EPOCHS - 2))
    assert finish(stem, task, home) == ALL[-3:]


def test_without_the_shards_of_one_node_all_begin_again(stem, task, home):
    shutil.rmtree(home / "nodes" / "node-00002")
    assert finish(stem, task, home) == ALL
    # And none of the others deletes its new shards because old ones have a higher step.
    assert [shard.name for shard in shards(home)] == NODES * [name(e) for e in ALL[-3:]]


def test_if_one_part_does_not_resume_none_does(task, group, home):
    for part in range(NODES):
        group.start(part, "--out", str(home), *(["--resume"] if part != 2 else []))
    all_ended = group.end()
    assert [ended.code for ended in all_ended] == [0] * NODES
    assert all_ended[0].epochs == ALL
    assert (home / "model.safetensors").read_bytes() == task.model


def test_leftovers_of_a_kill_are_cleared(stem, task, home):
    folders = [home, *(path.parent for path in shards(home))]
    leftovers = [folder / f".model.safetensors.{'0123456789abcdef' * 2}.tmp" for folder in folders]
    for path in leftovers:
        path.write_bytes(b"half of a file")
    assert finish(stem, task, home) == ALL[-1:]
    assert not any(path.exists() for path in leftovers)


def test_a_shard_of_another_training_is_not_taken(task, group, home):
    _, tensors = read(shard(home, 2, EPOCHS - 1))
    others = Shards(home / "nodes", (2,), "another training")
    others.save(2, BATCHES * (EPOCHS - 1), tensors, {})
    for part, ended in enumerate(group.start_all("--out", str(home), "--resume").end()):
        assert ended.code == 2
        said = f"{shard(home, 2, EPOCHS - 1)} belongs to a training with other options"
        if part != 2:
            said = f"the training stopped because node 2 says: {said}"
        assert ended.sentence.startswith(said)


def test_a_folder_is_not_taken_twice_and_all_say_so_at_once(group, home):
    begin = time.monotonic()
    all_ended = group.start_all("--out", str(home)).end()
    assert time.monotonic() - begin < group.timeout / 2
    for ended in all_ended:
        assert ended.code == 2
        assert f"{home} has a training; resume it, or choose another folder" in ended.sentence


def test_no_byte_of_a_shard_can_change_unnoticed(home):
    path = shard(home, 0, EPOCHS - 1)
    shards = Shards(home / "nodes", (0,), json.loads(read(path)[0]["hdnn"])["training"])
    assert shards.newest() == BATCHES * (EPOCHS - 1)
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert shards.newest() == BATCHES * (EPOCHS - 2), f"byte {place} of {len(whole)}"


# Disks


@pytest.fixture
def mounted(tmp_path):
    """A folder out/nodes/node-00002 on a file system of its own: `mounted(options)` is out."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    place = tmp_path / "out" / "nodes" / "node-00002"
    place.mkdir(parents=True)

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        return tmp_path / "out"

    yield mount
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=4k", "No space left on device"), ("ro", "Read-only file system")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_shard_is_named_by_all(group, mounted, options, reason):
    home = mounted(options)
    if options != "ro":
        (home / "nodes" / "node-00002" / "other").write_bytes(bytes(4096))
    for ended in group.start_all("--out", str(home)).end():
        assert ended.code == 2
        said = rf"(the training stopped because node 2 says: )?cannot write {home}/.*: {reason}; .*"
        assert re.fullmatch(said, ended.sentence), ended
    assert [path.name for path in shards(home)] == [name(1)] * (NODES - 1)


def test_a_folder_that_cannot_be_made_is_named_by_all(group, tmp_path):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "node-00002").write_bytes(b"")
    for ended in group.start_all("--out", str(tmp_path)).end():
        assert ended.code == 2
        assert f"cannot write to {tmp_path}/nodes/node-00002: File exists" in ended.sentence


# The launcher

PLAIN = [sys.executable, "-S", "-c"]  # a quick start, without packages
FAULTY = """
import os, signal, sys
first, part = os.environ["HDNN_RESTART"] == "0", os.environ["HDNN_PART"]
if first and part == "1":
    {fault}
print("part", part) if part == "0" else None
sys.exit(1 if first else 0)
"""


@pytest.mark.slow
def test_the_launcher_starts_all_again_after_a_kill_and_ends_the_same(task, tmp_path):
    path, home, news = tmp_path / "config.json", tmp_path / "out", []
    path.write_text(task.config.text())
    fault = (1, Fault(signal.SIGKILL, BATCHES * 2 + 1, 7))
    command = [sys.executable, graph_runs.__file__, json.dumps(fault), str(path)]
    ended = launch(2, [*command, "--out", str(home), "--resume"], restarts=1, show=news.append)
    assert (ended.code, ended.fault, ended.restarts) == (0, "", 1)
    (restarted,) = (one for one in news if "restart" in one)
    assert re.fullmatch(r"part 1 \(nodes \d, \d\) is gone", restarted["fault"])
    assert [one["epoch"] for one in news if "epoch" in one] == ALL
    assert json.loads(ended.output)["parts"] == 2
    assert (home / "model.safetensors").read_bytes() == task.model


@pytest.mark.parametrize(
    ("fault", "code", "restarts", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 0, 1, ""),
        ("sys.exit('nobody there')", 0, 1, ""),
        ("print('hdnn: no such graph', file=sys.stderr); sys.exit(2)", 2, 0, "no such graph"),
        ("sys.exit(130)", 130, 0, "node 1 ended with 130"),
    ],
)
def test_the_launcher_starts_again_where_that_may_help(fault, code, restarts, said):
    program = FAULTY.format(fault=fault).replace("sys.exit(1 if first else 0)", "")
    ended = launch(3, [*PLAIN, program], restarts=2, name="node {}".format)
    assert (ended.code, ended.restarts, ended.fault) == (code, restarts, said)
    assert ended.output == "part 0\n"


def test_the_launcher_does_not_start_again_for_ever():
    news = []
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    ended = launch(2, [*PLAIN, program], restarts=2, show=news.append)
    assert (ended.code, ended.restarts) == (1, 2)
    assert re.fullmatch("part [01] was killed by signal 9", ended.fault)
    assert [one["restart"] for one in news] == [1, 2]


def test_the_launcher_ends_a_frozen_part(monkeypatch):
    monkeypatch.setattr(importlib.import_module("hdnn.distributed.launch"), "GRACE", 0.2)
    processes = []
    program = FAULTY.format(fault="os.kill(os.getpid(), signal.SIGSTOP)")
    ended = launch(3, [*PLAIN, program], restarts=1, started=processes.extend)
    assert (ended.code, ended.restarts) == (0, 1)
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL, 1, 0, 0, 0]
