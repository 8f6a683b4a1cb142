"""Closed loops on processes: the bits of one process, and messages along the graph only."""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from audit import linked
from closed_loops import seeds
from graph_runs import Ended, Process, until
from hdnn import control
from hdnn.control import processes, worker
from hdnn.control.problems import load_problem
from hdnn.control.shared import SharedTraining
from hdnn.control.shares import Share, shared_out
from hdnn.distributed import DistributedError
from hdnn.distributed.graph.plan import Part
from hdnn.engine import jit
from hdnn.errors import OptionError, SparsityError, TrainingError
from hdnn.training.processes.meeting import TCPStore
from shared_loops import TINY, Threads, random_problem, ring, same, train, weights

pytestmark = pytest.mark.skipif(not jit.installed(), reason="needs numba")
needs_processes = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and dist.is_gloo_available()),
    reason="needs Linux and gloo",
)

# The same bits, however agents are shared out


@given(seeds, st.integers(2, 6), st.data())
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_the_number_of_processes(seed, N, data):
    ranks = data.draw(st.integers(2, N))
    one, alone = train(lambda: random_problem(seed, N), 1)
    many, run = train(lambda: random_problem(seed, N), ranks)
    assert same(one, many)
    assert run.history == alone.history
    assert not same(one, random_problem(seed, N))


@given(seeds, st.integers(2, 5))
@settings(max_examples=10, deadline=None)
def test_it_is_the_ordinary_training_to_rounding(seed, N):
    one, run = train(lambda: random_problem(seed, N), 1)
    ordinary = random_problem(seed, N)
    history = control.LoopTraining(ordinary, **TINY).run(progress=False)
    for x, y in zip(weights(one), weights(ordinary), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    for name, values in run.history.items():
        assert values == pytest.approx(history[name], rel=1e-10, abs=1e-12)


def test_twelve_robots_are_trained_alike_by_one_five_and_twelve():
    (one, first), *others = (train(ring, ranks) for ranks in (1, 5, 12))
    for many, run in others:
        assert same(one, many)
        assert run.history == first.history


# Neighbours only


@given(seeds, st.integers(3, 8), st.data())
@settings(max_examples=20, deadline=None)
def test_all_that_is_heard_comes_along_links(seed, N, data):
    problem = random_problem(seed, N)
    plan = shared_out(problem, data.draw(st.integers(1, N)))
    known = {*problem.loop.plant.links, *problem.loop.controller.links}
    for number in range(plan.parts):
        share = Share(problem, Part(plan, number))
        here = {*share.own}
        assert {agent for pair in known if here & {*pair} for agent in pair} | here == {
            *share.agents
        }
        colours = [*share.plant.colours, *share.controllers.colours]
        for messages in (share.weights, share.positions, *(c.messages for c in colours)):
            for (r, out), (s, into) in zip(messages.out, messages.into, strict=True):
                assert r == s
                mine = {share.agents[k] for k in out}
                theirs = {share.agents[k] for k in into}
                assert mine <= here
                assert {plan.owner[k] for k in theirs} == {r}
                for agent in mine:
                    assert any({agent, k} == {*pair} for pair in known for k in theirs)


def test_processes_talk_along_the_ring_only():
    problem, run = train(ring, 12)
    assert run.owner == [*range(12)]
    assert run.talked == {*problem.loop.controller.links}
    assert all(messages and size for _, _, messages, size in run.traffic)


# What is refused, before any work


def test_more_ranks_than_agents_are_refused():
    with pytest.raises(OptionError, match="12 agents cannot be shared out to 13 ranks"):
        control.train_on_processes(ring(), 13)


def test_a_cost_of_agents_that_are_not_linked_is_refused():
    with pytest.raises(SparsityError, match="the cost compares agents 0 and 2, which no link"):
        control.train_on_processes(control.crossing("ring"), 2)


def test_agents_that_nothing_joins_are_refused():
    problem = control.crossing([(0, 1)], cost=control.Cost(barrier=0.0))
    with pytest.raises(SparsityError, match="no links lead from agent 0 to agent 2"):
        control.train_on_processes(problem, 2)


def test_frozen_weights_and_other_dtypes_are_refused():
    problem = ring()
    problem.loop.controller.G.requires_grad_(False)
    with pytest.raises(TrainingError, match="some are frozen"):
        control.train_on_processes(problem, 2)
    problem = ring()
    problem.loop.controller.float()
    with pytest.raises(OptionError, match="float64"):
        control.train_on_processes(problem, 2)


def test_a_cost_of_ones_own_is_refused():
    class Dearer(control.Cost):
        pass

    problem = ring()
    problem.cost = Dearer(pairs=problem.cost.pairs)
    with pytest.raises(OptionError, match="nothing that extends it"):
        control.train_on_processes(problem, 2)


def test_what_cannot_work_is_refused_before_processes_are_started(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(processes, "launch", lambda *_, **__: begun.append(1))
    with pytest.raises(OptionError, match="started must be a function of processes, but got 3"):
        control.train_on_processes(ring(), 2, **TINY, started=3)  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("HDNN_TRANSPORT", "mpi")
    with pytest.raises(OptionError, match=r"talk by tcp or gloo, but .* HDNN_TRANSPORT=mpi"):
        control.train_on_processes(ring(), 2, **TINY, folder=tmp_path / "kept")
    assert not begun
    assert not (tmp_path / "kept").exists()
    assert len(control.train_on_processes(ring(), 1, **TINY).history["cost"]) == TINY["iterations"]


def test_a_cost_that_is_not_finite_ends_the_training():
    problem = ring()
    problem.loop.plant.a.fill_(1e200)
    with pytest.raises(TrainingError, match="not finite in iteration 1"):
        control.train_on_processes(problem, 1, **TINY)


# Real processes

STOPPED = """
import os, signal, sys
from hdnn.control import shared, worker

how, before = int(sys.argv.pop(1)), shared.SharedTraining._iterate

def iterate(self):
    if self.done == 2:
        os.kill(os.getpid(), how)
    before(self)

shared.SharedTraining._iterate = iterate
sys.exit(worker.main(sys.argv[1:]))
"""


class Workers:
    """The processes of one training in a folder, one of which gets a signal in its third step."""

    def __init__(self, stem, home: Path, problem: control.LoopProblem, parts: int) -> None:
        self.stem, self.home, self.parts = stem, home, parts
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        problem.save(home)
        (home / processes.OPTIONS).write_text(json.dumps({**TINY, "rate": 0.1, "seed": 0}))
        self.all: list[Process] = []

    def start(self, odd: int, how: signal.Signals) -> None:
        for part in range(self.parts):
            program = ["-m", worker.__name__]
            if part == odd:
                program = ["-c", STOPPED, str(int(how))]
            environment = {"HDNN_STORE": f"127.0.0.1:{self.store.port}"}
            environment |= {"HDNN_PARTS": str(self.parts), "HDNN_PART": str(part)}
            words = self.home / f"part-{part}"
            argv = [*program, str(self.home)]
            self.all.append(self.stem.fork(argv, words, environment=environment))

    def end(self) -> list[Ended]:
        return [process.wait() for process in self.all]


@pytest.mark.slow
@needs_processes
def test_twelve_processes_have_the_bits_of_one_and_are_connected_to_neighbours(stem, tmp_path):
    problem = ring()
    links = {*problem.loop.controller.links}
    workers = Workers(stem, tmp_path, problem, 12)
    workers.start(3, signal.SIGSTOP)
    until(workers.all[3].stopped)  # and so its neighbours wait for it, and theirs for them
    seen, others = linked([process.pid for process in workers.all])
    workers.all[3].send(signal.SIGCONT)
    assert [(ended.code, ended.errors) for ended in workers.end()] == [(0, "")] * 12
    assert seen == links
    assert others == [{("127.0.0.1", workers.store.port)}] * 12
    result = json.loads((tmp_path / processes.RESULT).read_text())
    assert {(min(a, b), max(a, b)) for a, b, *_ in result["traffic"]} == links
    run = control.train_on_processes(problem, 1, **TINY)
    assert same(problem, load_problem(tmp_path / processes.TRAINED))
    assert result["history"] == run.history


@needs_processes
def test_where_a_process_dies_all_others_say_so(stem, tmp_path):
    workers = Workers(stem, tmp_path, ring(), 4)
    workers.start(2, signal.SIGKILL)
    all_ended = workers.end()
    assert all_ended.pop(2).code == -signal.SIGKILL
    for ended in all_ended:
        assert ended.code == 1
        said = r"the training stopped because the process of agents [\d, .]+ is gone( \(.*\))?\."
        assert re.fullmatch(said, ended.sentence), ended
    assert not (tmp_path / processes.RESULT).exists()


@needs_processes
def test_two_processes_are_started_and_give_the_same_bits():
    one, two = ring(), ring()
    alone, run = (control.train_on_processes(p, k, **TINY) for p, k in ((one, 1), (two, 2)))
    assert same(one, two)
    assert run.history == alone.history
    assert run.talked == {(0, 1)}
    assert {*run.owner} == {0, 1}


@needs_processes
def test_where_a_process_is_killed_the_problem_stays_as_it_is():
    def kill(started: list[subprocess.Popen[str]]) -> None:
        os.kill(started[1].pid, signal.SIGKILL)

    problem = ring()
    with pytest.raises(DistributedError, match=r"failed: the process of .* was killed by signal 9"):
        control.train_on_processes(problem, 2, **TINY, timeout=10.0, started=kill)
    assert same(problem, ring())


@needs_processes
def test_a_process_says_what_it_cannot_read(tmp_path, capsys):
    assert worker.main([str(tmp_path)]) == 2
    assert "has no options of a training: No such file" in capsys.readouterr().err


def test_a_part_of_another_problem_is_told_apart():
    lines = {pair: queue.Queue() for pair in itertools.product(range(2), repeat=2)}
    plan, said = shared_out(ring(), 2), []

    def work(part: int) -> None:
        problem = ring()
        if part:
            problem.loop.controller.b.data[0] += 1
        try:
            SharedTraining(problem, plan, Threads(part, 2, lines), **TINY)
        except DistributedError as error:
            said.append(str(error))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another data set" in sentence for sentence in said)
    assert len(said) == 2
