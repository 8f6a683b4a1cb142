"""Benchmarks import what exists, compare with what they say, and write what programs can read."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdnn import control, functional, io

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
TABLES = ("estimators", "table_sets")


@pytest.fixture
def program(monkeypatch):
    """A function that imports a program by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name in PROGRAMS:  # names as plain as "control" are not left behind
            del sys.modules[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_only_what_exists(program, name):
    if name in TABLES:
        pytest.importorskip("sklearn")
        pytest.importorskip("pandas")
    assert program(name).__doc__


def test_the_balance_is_exact_for_a_controller_that_once_lost_three_digits(
    program,
):
    assert program("control").violation(764) <= 1e-13


# The command line and the page


def test_a_command_takes_sizes_as_options_and_writes_page_and_numbers(
    program, tmp_path, monkeypatch, capsys
):
    report = program("report")
    sizes = {
        "full": {"count": 100, "depths": (1, 2)},
        "quick": {"count": 3, "depths": (1,)},
    }

    def run(chosen, device):
        return {"double": 2 * chosen["count"], "ok": chosen["count"] < 50}

    def page(result):
        lines = report.head("Title", result)
        lines += report.table("a | b", [[1, result["double"]]])
        return report.text_of(lines)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["some.py", *words])
        return report.command("some", None, sizes, run, page, devices=("cpu",))

    assert call("--quick", "--count", "7", "--out", str(tmp_path)) == 0
    text = (tmp_path / "some.md").read_text()
    assert text.startswith(
        "# Title\n\n`python benchmarks/some.py --quick --count 7`, machine "
    )
    assert text.endswith("\n\n| a | b |\n| --- | --- |\n| 1 | 14 |\n")
    assert text in capsys.readouterr().out
    result = json.loads((tmp_path / "some.json").read_text())
    assert result["sizes"] == {"count": 7, "depths": [1]}
    assert call() == 1  # the result is not as it should be


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_program_that_needs_a_gpu_says_so(program, monkeypatch, capsys):
    images = program("images")
    report = program("report")
    monkeypatch.setattr(sys, "argv", ["images.py"])
    sizes = images.SIZES
    assert (
        report.command(
            "images", None, sizes, images.run, images.page, devices=("cuda",)
        )
        == 2
    )
    assert "a GPU is needed" in capsys.readouterr().err


# Rivals compute the same


@pytest.mark.parametrize("kind", ["h1", "h2"])
def test_the_plain_loop_computes_what_the_library_computes(program, kind):
    rivals = program("engine")
    tensors = [
        t.detach().double() for t in rivals.weights(kind, 6, 5, 7, "cpu")
    ]
    ours = getattr(functional, kind)(*tensors, rivals.H)
    torch.testing.assert_close(rivals.PLAIN[kind](*tensors, rivals.H), ours)


def test_forward_euler_of_the_rival_goes_to_the_closed_loop(program):
    errors = []
    for steps in (200, 400):
        problem = control.crossing("ring", steps=steps)
        y = problem.starts(1)
        rival = program("control").Authors(problem, written_out=True)
        with torch.no_grad():
            difference = rival(y)[-1] - problem.loop(y)[-1]
        errors.append(float(difference.abs().max()))
    assert errors[1] < 0.7 * errors[0] < 0.2


def test_both_ways_of_the_rival_have_one_cost_and_gradient(program):
    problem = control.crossing("ring")
    y = problem.starts(2)
    results = []
    for written_out in (True, False):
        net = program("control").Authors(problem, written_out)
        loss = net.loss(net(y))
        loss.backward()
        results.append(
            [loss.detach(), *(weight.grad for weight in net.parameters())]
        )
    for a, b in zip(*results, strict=True):
        assert (
            float((a - b).norm() / b.norm()) < 1e-3
        )  # in float32, over 100 steps


def test_the_balance_of_a_random_controller_that_once_failed_is_exact(program):
    # A Newton step that was lucky left an error of 3.6e-13.
    assert program("control").violation(764) < 1e-13


# Judges can say no


def test_gradients_that_are_off_are_told_from_exact_ones(program):
    gradients = program("gradients")
    exact = [
        torch.ones(3, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    ]
    assert gradients.off(exact, exact) == 0
    assert gradients.off([1.5 * exact[0], exact[1]], exact) == pytest.approx(
        0.5
    )
    assert gradients.off(
        [torch.full((3,), float("nan")), exact[1]], exact
    ) == float("inf")


def test_trainings_that_differ_in_one_bit_are_not_the_same(program, tmp_path):
    kill = program("kill")
    about = {"values": {"history": {"loss": [1.0, 0.5]}}}
    weights = {"a": torch.ones(3)}
    for name, value, loss in (
        ("one", 1.0, 0.5),
        ("two", 1.0 + 2**-23, 0.5),
        ("three", 1.0, 0.4),
    ):
        (tmp_path / name).mkdir()
        weights["a"][0] = value
        about["values"]["history"]["loss"][1] = loss
        io.save_tensors(tmp_path / name / kill.CHECKPOINT, weights, about)
    assert kill.same(tmp_path / "one", tmp_path / "one")
    assert not kill.same(tmp_path / "one", tmp_path / "two")
    assert not kill.same(tmp_path / "one", tmp_path / "three")
    assert kill.epochs_in(tmp_path / "one") == 2
    assert kill.epochs_in(tmp_path / "none") == 0


def test_a_process_is_killed_unless_it_has_ended(program):
    kill = program("kill").kill
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as waiting:
        assert kill(waiting, 0.01)
    assert not kill(subprocess.Popen([sys.executable, "-c", ""]), 60)


@pytest.mark.slow
def test_the_benchmark_of_the_engine_runs_and_writes_a_page(
    program, tmp_path, monkeypatch
):
    engine = program("engine")
    monkeypatch.setattr(
        sys, "argv", ["engine.py", "--quick", "--out", str(tmp_path)]
    )
    assert engine.main() == 0
    result = json.loads((tmp_path / "engine-cpu.json").read_text())
    assert all(row["ratio"] > 1 for row in result["speed"])
    assert max(result["accuracy"].values()) < 1e-5
    assert "plain / hdnn" in (tmp_path / "engine-cpu.md").read_text()


def test_gradients_too_small_for_their_squares_are_not_reported_as_zero(
    program,
):
    contrast = program("contrast")
    sizes = {"features": 2, "samples": 1, "seeds": 1}
    torch.set_default_dtype(torch.float64)
    try:
        row = contrast.measure("perceptron", 700, sizes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert 0 < row["single"][0] < 1e-160
    assert row["single"][-1] <= 1.001 * row["median"]
