"""Trainings on processes that were interrupted, killed or out of room go on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from graph_runs import Ended, Process, until
from hdnn import control
from hdnn.control import processes, shared
from hdnn.control.kept import Keeping, identity
from hdnn.control.shares import shared_out
from hdnn.engine import jit
from hdnn.errors import CheckpointError, OptionError, ShapeError
from hdnn.training import checkpoint
from hdnn.training.processes.meeting import TCPStore
from shared_loops import random_problem, ring, same, train

pytestmark = pytest.mark.skipif(not jit.installed(), reason="needs numba")
needs_processes = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and dist.is_gloo_available()),
    reason="needs Linux and gloo",
)

OPTIONS: dict[str, Any] = {"iterations": 5, "batch": 2, "rate": 0.1, "seed": 0}

STOPPED = """
import os, resource, signal, sys
from hdnn.control import shared, worker

how, before = sys.argv.pop(1), shared.SharedTraining._iterate
shared.SAVE_EVERY = 0.0

def end(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def iterate(self):
    if self.done == 2:
        if how == "killed":
            end()
        if how == "killed while saving":
            os.fsync = end
        if how == "out of room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    before(self)

shared.SharedTraining._iterate = iterate
sys.exit(worker.main(sys.argv[1:]))
"""


class StopError(Exception):
    """As if the process ended."""


def stopped_at(monkeypatch: pytest.MonkeyPatch, done: int, folder: Path, make=ring) -> None:
    """Train in this process, kept after each iteration, until so many are done."""
    before = shared.SharedTraining._iterate

    def iterate(self: shared.SharedTraining) -> None:
        if self.done == done:
            raise StopError
        before(self)

    with monkeypatch.context() as patch:
        patch.setattr(shared, "SAVE_EVERY", 0.0)
        patch.setattr(shared.SharedTraining, "_iterate", iterate)
        with pytest.raises(StopError):
            control.train_on_processes(make(), 1, **OPTIONS, folder=folder, resume=True)


def whole(make=ring) -> tuple[control.LoopProblem, control.ProcessRun]:
    problem = make()
    return problem, control.train_on_processes(problem, 1, **OPTIONS)


def check_whole(folder: Path, ranks: int = 1) -> control.ProcessRun:
    """Go on with a training on a ring, and compare it with one that was never stopped."""
    problem, (right, run) = ring(), whole()
    found = control.train_on_processes(problem, ranks, **OPTIONS, folder=folder, resume=True)
    assert same(problem, right)
    assert found.history == run.history
    assert same(control.load_problem(folder), right)
    lines = [json.loads(line) for line in (folder / checkpoint.LOG).read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["cost"] for line in lines] == run.history["cost"]
    assert not list(folder.glob(".*.tmp"))
    return found


# In one process


@pytest.mark.parametrize(("done", "ranks"), [(0, 1), (1, 2), (3, 3), (4, 5), (2, 6)])
def test_any_number_of_processes_goes_on_to_the_same_bits(monkeypatch, tmp_path, done, ranks):
    def make() -> control.LoopProblem:
        return random_problem(ranks, 6)

    stopped_at(monkeypatch, done, tmp_path, make)
    keeping = Keeping(tmp_path, identity(make(), OPTIONS), (4,))
    many, run = train(make, ranks, **OPTIONS, keeping=keeping)
    right, alone = whole(make)
    assert same(many, right)
    assert run.history == alone.history
    kept = checkpoint.read(tmp_path, {})
    assert kept is not None
    assert kept.state["epoch"] == 5
    assert kept.state["seconds"] == run.seconds > 0
    assert kept.state["processor_seconds"] == run.processor_seconds > 0
    assert (tmp_path / "during-4").is_dir() == (done < 4)


def test_a_finished_training_stays_as_it_is_and_times_are_those_of_all_starts(
    monkeypatch, tmp_path
):
    stopped_at(monkeypatch, 3, tmp_path)
    kept = checkpoint.read(tmp_path, {})
    assert kept is not None
    run = check_whole(tmp_path)
    assert run.seconds > kept.state["seconds"] > 0
    assert run.processor_seconds > kept.state["processor_seconds"] > 0
    content = (tmp_path / checkpoint.NAME).read_bytes()
    again = check_whole(tmp_path, ranks=2)
    assert (again.seconds, again.processor_seconds) == (run.seconds, run.processor_seconds)
    assert again.traffic == []
    assert (tmp_path / checkpoint.NAME).read_bytes() == content


def test_ctrl_c_keeps_the_training_and_leaves_the_problem(monkeypatch, tmp_path):
    before, problem = shared.SharedTraining._iterate, ring()

    def iterate(self: shared.SharedTraining) -> None:
        before(self)
        if self.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(shared.SharedTraining, "_iterate", iterate)
        with pytest.raises(KeyboardInterrupt):
            control.train_on_processes(problem, 1, **OPTIONS, folder=tmp_path)
    assert same(problem, ring())
    kept = checkpoint.read(tmp_path, {})
    assert kept is not None
    assert kept.state["epoch"] == 3
    check_whole(tmp_path)


def test_what_does_not_belong_together_is_refused_in_a_sentence(monkeypatch, tmp_path):
    def begin(folder: Path = tmp_path, problem: Any = None, **options: Any) -> None:
        given = {**OPTIONS, "resume": True, **options}
        control.train_on_processes(problem or ring(), 2, **given, folder=folder)

    stopped_at(monkeypatch, 2, tmp_path)
    with pytest.raises(CheckpointError, match="holds a training already"):
        begin(resume=False)
    with pytest.raises(CheckpointError, match="its batch is 2, not 3"):
        begin(batch=3)
    other = ring()
    other.loop.controller.b.data[0] += 1
    with pytest.raises(CheckpointError, match="give the problem as it was at the start"):
        begin(problem=other)
    with pytest.raises(CheckpointError, match="its batch is 2, not 3"):
        begin(problem=other, batch=3)
    alone = "is of a training on processes, which rounds in another order"
    with pytest.raises(CheckpointError, match=alone):
        control.LoopTraining.resume(tmp_path)
    with pytest.raises(CheckpointError, match=alone):
        control.LoopTraining(ring(), iterations=5, batch=2, folder=tmp_path, resume=True)
    control.LoopTraining(ring(), iterations=5, batch=2, folder=tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"is of a LoopTraining, .* LoopTraining.resume"):
        begin(tmp_path / "alone")
    with pytest.raises(OptionError, match="stages are kept in the folder of the training"):
        control.train_on_processes(ring(), 2, stages=[1])
    with pytest.raises(OptionError, match="stages must be whole numbers, but got 3"):
        begin(stages=3)
    with pytest.raises(OptionError, match="stages are iterations up to the last, 5, but one is 6"):
        begin(stages=[1, 6])
    with pytest.raises(ShapeError, match="stages must be a whole number >= 0"):
        begin(stages=[-1])
    with pytest.raises(CheckpointError, match="resume needs the folder"):
        control.train_on_processes(ring(), 2, resume=True)
    file = tmp_path / checkpoint.NAME
    content = file.read_bytes()
    file.write_bytes(content[:-5000] + bytes([content[-5000] ^ 1]) + content[-4999:])
    with pytest.raises(CheckpointError, match="damaged"):
        begin()


# Real processes


class Kept:
    """The processes of a training that is kept, one of which does not get through its third step.

    Args:
        stem: starts them.
        home: a folder for all of it.
        parts: how many.
        odd: which of them.
        how: as `STOPPED` knows it.
    """

    def __init__(self, stem, home: Path, parts: int, odd: int, how: str) -> None:
        self.folder = home / "kept"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder.mkdir()
        ring().save(home)
        keeping = Keeping(self.folder, identity(ring(), OPTIONS))
        processes.write_task(home, OPTIONS, keeping)
        self.all: list[Process] = []
        for part in range(parts):
            environment = {"HDNN_STORE": f"127.0.0.1:{self.store.port}", "HDNN_TRANSPORT": "tcp"}
            environment |= {"HDNN_PARTS": str(parts), "HDNN_PART": str(part)}
            argv = ["-c", STOPPED, how if part == odd else "", str(home)]
            self.all.append(stem.fork(argv, home / f"part-{part}", environment=environment))

    def end(self) -> list[Ended]:
        return [process.wait() for process in self.all]

    @property
    def done(self) -> int:
        saved = checkpoint.read(self.folder, {})
        return 0 if saved is None else saved.state["epoch"]


def parts_of(parts: int) -> tuple[int, int]:
    """The process of the root, and another one."""
    plan = shared_out(ring(), parts)
    root = plan.owner[plan.tree.root]
    return root, (root + 1) % parts


@needs_processes
@pytest.mark.parametrize("how", ["killed", "killed while saving"])
def test_a_training_goes_on_after_its_root_was_killed(stem, tmp_path, how):
    root, _ = parts_of(3)
    kept = Kept(stem, tmp_path, 3, root, how)
    codes = [ended.code for ended in kept.end()]
    assert codes.pop(root) == -signal.SIGKILL
    assert codes == [1, 1]
    assert kept.done == 2
    check_whole(kept.folder)


@needs_processes
def test_a_training_goes_on_after_another_process_was_killed(stem, tmp_path):
    root, other = parts_of(3)
    kept = Kept(stem, tmp_path, 3, other, "killed")
    ended = kept.end()
    assert ended[other].code == -signal.SIGKILL
    assert "the training stopped because the process of agent" in ended[root].sentence
    assert kept.done == 2
    check_whole(kept.folder)


@needs_processes
def test_a_training_goes_on_after_all_were_killed(stem, tmp_path):
    _, other = parts_of(3)
    kept = Kept(stem, tmp_path, 3, other, "stopped")
    until(kept.all[other].stopped)
    with pytest.raises(CheckpointError, match="another process is training in"):
        control.train_on_processes(ring(), 1, **OPTIONS, folder=kept.folder, resume=True)
    for process in kept.all:
        process.kill()
    assert [ended.code for ended in kept.end()] == [-signal.SIGKILL] * 3
    check_whole(kept.folder)


@needs_processes
def test_a_full_disk_ends_a_training_in_a_sentence_and_nothing_is_lost(stem, tmp_path):
    root, _ = parts_of(3)
    kept = Kept(stem, tmp_path, 3, root, "out of room")
    ended = kept.end()
    assert [each.code for each in ended] == [2, 2, 2]
    for each in ended:
        assert "cannot write" in each.sentence
        assert "File too large" in each.sentence
    assert kept.done == 2
    check_whole(kept.folder)


@needs_processes
def test_an_interruption_of_any_process_is_one_of_all(stem, tmp_path):
    _, other = parts_of(3)
    kept = Kept(stem, tmp_path, 3, other, "interrupted")
    assert [(ended.code, ended.errors) for ended in kept.end()] == [(130, "")] * 3
    assert kept.done == 3
    check_whole(kept.folder)


LAUNCHED = """
import sys
from hdnn import control

sys.path.insert(0, sys.argv[2])
from shared_loops import ring

def started(processes):
    print(*(process.pid for process in processes), flush=True)

options = {"iterations": 100000, "batch": 2}
control.train_on_processes(ring(), 2, **options, folder=sys.argv[1], started=started, timeout=20.0)
"""


@needs_processes
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_training_goes_on_after_its_launcher_was_stopped(monkeypatch, tmp_path, how):
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LAUNCHED, str(tmp_path), str(here)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        until(lambda: (tmp_path / checkpoint.LOG).is_file())
        until(lambda: len((tmp_path / checkpoint.LOG).read_text().splitlines()) > 10)
        launcher.send_signal(how)
        _, errors = launcher.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (how == signal.SIGINT)
    until(lambda: not any(map(alive, pids)))  # they keep what they have, and end
    kept = checkpoint.read(tmp_path, {})
    assert kept is not None
    done = kept.state["epoch"]
    assert done > 10
    gone_on, never_stopped = (
        weights_after(monkeypatch, done + 2, folder) for folder in (tmp_path, tmp_path / "other")
    )
    assert same(gone_on, never_stopped)


def weights_after(monkeypatch, done: int, folder: Path) -> control.LoopProblem:
    """Go on with that training, or begin it, up to an iteration."""
    before = shared.SharedTraining._iterate

    def iterate(self: shared.SharedTraining) -> None:
        if self.done == done:
            raise StopError
        before(self)

    options = {"iterations": 100000, "batch": 2, "folder": folder, "resume": True}
    with monkeypatch.context() as patch:
        patch.setattr(shared.SharedTraining, "_iterate", iterate)
        with pytest.raises(StopError):
            control.train_on_processes(ring(), 1, **options, stages=[done])
    return control.load_problem(folder / f"during-{done}")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
