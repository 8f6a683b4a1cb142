"""Training of closed loops: gradients, exact resume, interruptions, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closed_loops
from hdnn import control
from hdnn.control import costs, fused_cost
from hdnn.control import training as trainings
from hdnn.control.training import BETAS, factor
from hdnn.errors import CheckpointError, OptionError, ShapeError, StepError, TrainingError

KILLED = """
import sys
from hdnn import control
from hdnn.control import training
training.SAVE_EVERY = 0.0
problem = control.crossing("ring", steps=4)
whole = control.LoopTraining(problem, iterations=100000, batch=2, folder=sys.argv[1])
whole.run(callback=lambda t: print(t.done, flush=True))
"""


def crossing(engine: str | None = None) -> control.LoopProblem:
    return control.crossing("ring", steps=4, engine=engine)


def weights(training: control.LoopTraining) -> list[torch.Tensor]:
    return [p.detach().clone() for p in training.loop.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_iteration_is_a_step_of_adam_on_the_cost():
    training, plain = (control.LoopTraining(crossing(), iterations=2, batch=3) for _ in range(2))
    training.run()
    optimizer = torch.optim.Adam(plain.loop.parameters(), betas=BETAS)
    for k in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * factor(k, 2)
        optimizer.zero_grad()
        cost = plain.problem.cost(plain.loop, plain.loop(plain.starts(k)))
        assert training.history["cost"][k] == pytest.approx(float(cost.detach()), rel=1e-12)
        cost.backward()
        optimizer.step()
    for a, b in zip(weights(training), weights(plain), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 8, 9, 17])
def test_bits_do_not_depend_on_threads(batch):
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            training = control.LoopTraining(crossing("fused"), iterations=2, batch=batch)
            training.run(callback=lambda _, n=threads: torch.get_num_threads() != n)
            assert training.done == 2  # callbacks have the threads of their caller
            found.append((weights(training), training.history))
    finally:
        torch.set_num_threads(before)
    assert all(same(found[0][0], each) and found[0][1] == history for each, history in found[1:])


def test_no_weight_moves_by_more_than_the_rate():
    training = control.LoopTraining(crossing(), iterations=30, batch=1)
    before = weights(training)

    def check(now: control.LoopTraining) -> None:
        nonlocal before
        after, rate = weights(now), now.history["rate"][-1]
        for a, b in zip(before, after, strict=True):
            assert float((a - b).abs().max()) <= rate * (1 + 1e-12)
        before = after

    training.run(callback=check)
    assert training.done == 30


def test_a_huge_gradient_is_forgotten_soon():
    """Where robots meet, gradients are huge; with 0.999 Adam would move no more."""
    training = control.LoopTraining(crossing(), iterations=300, batch=1)
    training.run(until=5)
    for slots in training.optimizer.state.values():
        slots["exp_avg_sq"].mul_(1e6)
    training.run(until=250)
    before = weights(training)
    training.run(until=251)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, weights(training), strict=True))
    assert moved > 0.05 * training.history["rate"][-1]


def test_both_engines_train_alike():
    fused, plain = (
        control.LoopTraining(crossing(engine), iterations=2, batch=2)
        for engine in ("fused", "reference")
    )
    for training in (fused, plain):
        training.run()
    assert fused.history["cost"] == pytest.approx(plain.history["cost"], rel=1e-9)
    for a, b in zip(weights(fused), weights(plain), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


@given(closed_loops.seeds, st.integers(1, 4), st.sampled_from([4, 5]), st.integers(1, 3))
@settings(max_examples=25)
def test_the_kernel_of_costs_is_the_cost_and_its_gradients(seed: int, N: int, c: int, B: int):
    loop, normal = closed_loops.random_loop(seed, N, 1.0, 0.1, c=c)
    pairs = [(i, k) for i in range(N) for k in range(i)][::2] if seed % 2 else None
    cost = control.Cost(barrier=2.0, distance=2.0, end=3.0, smoothness=0.5, pairs=pairs)
    y = normal(4, B, N, 3 + c).requires_grad_()
    assert not fused_cost.why_not(loop, cost, y)
    found, terms = fused_cost.priced(loop, cost, y), cost.terms(loop, y)
    sum(terms.values(), torch.zeros(())).backward()
    for name, term in terms.items():
        assert found.terms[name] == pytest.approx(float(term.detach()), rel=1e-12, abs=1e-12), name
    assert y.grad is not None
    torch.testing.assert_close(found.states, y.grad, rtol=1e-10, atol=1e-10)
    for name, gradient in found.weights.items():
        right = getattr(loop.controller, name).grad
        torch.testing.assert_close(gradient, right, rtol=1e-10, atol=1e-10)
    squares = costs.between(y.detach(), 2, pairs)
    nearest = float(squares.amin()) ** 0.5 if squares.numel() else float("inf")
    assert found.nearest == pytest.approx(nearest)


def test_costs_that_the_kernel_is_not_for_take_the_plain_way():
    class Twice(control.Cost):
        def terms(self, loop: control.ClosedLoop, trajectory: torch.Tensor):
            return {n: 2 * term for n, term in super().terms(loop, trajectory).items()}

    once, twice = crossing(), crossing()
    twice.cost = Twice()
    found = [control.LoopTraining(p, iterations=1, batch=2).run()["cost"] for p in (once, twice)]
    assert found[1][0] == pytest.approx(2 * found[0][0], rel=1e-12)


def test_one_agent_alone_can_be_trained_and_frozen_weights_stay():
    plant = control.robots(torch.tensor([[1.0, 0.0]]))
    loop = control.ClosedLoop(plant, control.Controller(1, steps=4))
    loop.controller.G.requires_grad_(False)
    before = loop.controller.G.detach().clone(), loop.controller.K.detach().clone()
    history = control.LoopTraining(control.LoopProblem(loop, torch.zeros(1, 4)), iterations=2).run()
    assert "distance" not in history
    assert torch.equal(loop.controller.G, before[0])
    assert not torch.equal(loop.controller.K, before[1])


def test_the_rate_rises_and_falls():
    rates = [factor(k, 300) for k in range(300)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.02, abs=0.001)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_a_training_lowers_the_cost():
    training = control.LoopTraining(crossing(), iterations=15, batch=4)
    history = training.run(progress=False)
    assert history["cost"][-1] < history["cost"][0]
    terms = ("state", "effort", "barrier", "smoothness", "end")
    for k, cost in enumerate(history["cost"]):
        assert sum(history[name][k] for name in terms) == pytest.approx(cost)
    assert all(distance > 0 for distance in history["distance"])
    certificate = training.certify()
    assert certificate.holds
    assert certificate.bound > 0


def test_a_run_in_parts_has_the_bits_of_one(tmp_path: Path):
    whole = control.LoopTraining(crossing(), iterations=6, batch=3, seed=5)
    whole.run()
    parts = control.LoopTraining(crossing(), iterations=6, batch=3, seed=5, folder=tmp_path)
    parts.run(until=2)
    parts.run(callback=lambda training: training.done == 3)
    assert parts.done == 3
    again = control.LoopTraining.resume(tmp_path)
    assert (again.done, again.batch, again.seed) == (3, 3, 5)
    again.run(until=4)
    last = control.LoopTraining(
        crossing(), iterations=6, batch=3, seed=5, folder=tmp_path, resume=True
    )
    assert last.done == 4
    last.run()
    assert same(weights(last), weights(whole))
    assert last.history == whole.history
    kept = control.load_problem(tmp_path)
    assert same([p.detach() for p in kept.loop.parameters()], weights(whole))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["cost"] for line in lines] == whole.history["cost"]


def test_a_resumed_training_keeps_its_engine_and_what_is_frozen(tmp_path: Path):
    def frozen() -> control.LoopProblem:
        problem = crossing("reference")
        problem.loop.controller.C.requires_grad_(False)
        return problem

    whole = control.LoopTraining(frozen(), iterations=4, batch=2)
    whole.run()
    control.LoopTraining(frozen(), iterations=4, batch=2, folder=tmp_path).run(until=2)
    again = control.LoopTraining.resume(tmp_path)
    assert again.loop.engine == "reference"
    assert not again.loop.controller.C.requires_grad
    again.run()
    assert same(weights(again), weights(whole))
    crossing("fused").save(tmp_path)  # of another training
    with pytest.raises(CheckpointError, match="its engine of the loop is 'reference', not 'fused'"):
        control.LoopTraining.resume(tmp_path)
    moved = frozen()
    moved.z = moved.z + 1
    moved.save(tmp_path)
    with pytest.raises(CheckpointError, match="its agents is"):
        control.LoopTraining.resume(tmp_path)


def test_a_training_goes_on_with_a_cost_of_ones_own_if_it_is_given_again(tmp_path: Path):
    class Dearer(control.Cost):
        pass

    def problem() -> control.LoopProblem:
        return control.crossing("ring", steps=4, cost=Dearer())

    options = {"iterations": 2, "batch": 2, "folder": tmp_path, "resume": True}
    control.LoopTraining(problem(), **options).run(until=1)
    with pytest.raises(CheckpointError, match="is a Dearer, which no file can hold"):
        control.LoopTraining.resume(tmp_path)
    with pytest.raises(CheckpointError, match="its kind of cost is 'Dearer', not 'Cost'"):
        control.LoopTraining(crossing(), **options)
    assert control.LoopTraining(problem(), **options).done == 1


def test_an_older_object_does_not_write_over_a_training(tmp_path: Path):
    old = control.LoopTraining(crossing(), iterations=3, batch=2, folder=tmp_path)
    control.LoopTraining.resume(tmp_path).run(until=2)
    with pytest.raises(CheckpointError, match="has gone on to iteration 2, and this object is at"):
        old.run(until=1)
    assert control.LoopTraining.resume(tmp_path).done == 2


def test_a_training_with_other_links_is_another_one(tmp_path: Path):
    def problem(links: list[tuple[int, int]], plant: list[tuple[int, int]]) -> control.LoopProblem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            controller = control.Controller(3, 2, inputs=1, links=links)
        loop = control.ClosedLoop(control.oscillators(plant, agents=3), controller)
        cost = control.Cost(dimensions=1)
        return control.LoopProblem(loop, torch.zeros(3, loop.plant.states), 0, cost, collision=0)

    options = {"iterations": 1, "batch": 1, "folder": tmp_path, "resume": True}
    first, other = [(0, 1)], [(1, 2)]
    control.LoopTraining(problem(first, first), **options)
    with pytest.raises(CheckpointError, match="its links is '0-1', not '1-2'"):
        control.LoopTraining(problem(other, first), **options)
    with pytest.raises(CheckpointError, match="its plant links is '0-1', not '1-2'"):
        control.LoopTraining(problem(first, other), **options)
    control.LoopTraining(problem(first, first), **options)


def test_checkpoints_of_earlier_versions_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as earlier:
        now = trainings.identity_of

        def then(problem: control.LoopProblem):
            return {n: part for n, part in now(problem).items() if n not in trainings.LATER}

        earlier.setattr(trainings, "identity_of", then)
        control.LoopTraining(crossing(), iterations=2, batch=2, folder=tmp_path).run(until=1)
    assert control.LoopTraining.resume(tmp_path).done == 1
    options = {"iterations": 2, "batch": 2, "folder": tmp_path, "resume": True}
    control.LoopTraining(crossing(), **options).run()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_training_goes_on_after_it_was_killed(tmp_path: Path, kind: signal.Signals):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 3:
        pass
    time.sleep(float(os.urandom(1)[0]) / 1e4)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (kind == signal.SIGINT)
    training = control.LoopTraining.resume(tmp_path)
    assert training.done >= 2
    last = training.done + 2
    training.run(until=last)
    whole = control.LoopTraining(crossing(), iterations=100000, batch=2)
    whole.run(until=last)
    assert same(weights(training), weights(whole))
    assert training.history == whole.history
    assert not list(tmp_path.glob(".*.tmp"))


def test_bad_options_are_refused_in_a_sentence(tmp_path: Path):
    problem = crossing()
    with pytest.raises(ShapeError, match="iterations must be a whole number >= 1, but got 0"):
        control.LoopTraining(problem, iterations=0)
    with pytest.raises(ShapeError, match="batch must be a whole number >= 1"):
        control.LoopTraining(problem, batch=0)
    with pytest.raises(StepError, match="rate must be finite and > 0"):
        control.LoopTraining(problem, rate=-0.1)
    with pytest.raises(OptionError, match="problem must be a LoopProblem, but got None"):
        control.LoopTraining(None)  # pyright: ignore
    with pytest.raises(OptionError, match="progress must be True or False, but got 'x'"):
        control.LoopTraining(problem).run("x")  # pyright: ignore
    with pytest.raises(OptionError, match="callback must be a function, but got 'x'"):
        control.LoopTraining(problem).run(callback="x")  # pyright: ignore
    with pytest.raises(CheckpointError, match="does not exist"):
        control.LoopTraining.resume(tmp_path)
    problem.save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no training"):
        control.LoopTraining.resume(tmp_path)
    control.LoopTraining(problem, iterations=2, folder=tmp_path)
    with pytest.raises(CheckpointError, match="holds a training already"):
        control.LoopTraining(problem, iterations=2, folder=tmp_path)
    with pytest.raises(CheckpointError, match="its iterations is 2, not 3"):
        control.LoopTraining(problem, iterations=3, folder=tmp_path, resume=True)
    other = control.crossing("ring", 1, steps=4)
    with pytest.raises(CheckpointError, match="its start is"):
        control.LoopTraining(other, iterations=2, folder=tmp_path, resume=True)
    file = tmp_path / "checkpoint.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-20000] + bytes([content[-20000] ^ 1]) + content[-19999:])
    with pytest.raises(CheckpointError, match="damaged"):
        control.LoopTraining.resume(tmp_path)
    problem.loop.requires_grad_(False)
    with pytest.raises(TrainingError, match="all weights of the controllers are frozen"):
        control.LoopTraining(problem)


def test_a_cost_that_is_not_finite_ends_the_training():
    problem = crossing()
    problem.cost = control.Cost(state=1e30, end=1e30)
    problem.z = problem.z * 1e150
    with pytest.raises(TrainingError, match="the cost is not finite in iteration 1"):
        control.LoopTraining(problem).run()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_training_needs_no_gradients_of_whoever_runs_it(mode):
    training, other = (control.LoopTraining(crossing(), iterations=2, batch=2) for _ in range(2))
    training.run()
    with mode():
        other.run()
    assert same(weights(training), weights(other))


def test_weights_that_were_frozen_since_are_one_sentence():
    training = control.LoopTraining(crossing(), iterations=2, batch=2)
    training.loop.requires_grad_(False)
    with pytest.raises(TrainingError, match="all weights of the controllers are frozen"):
        training.run()
