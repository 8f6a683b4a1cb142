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
from hdnn.dynamics import FlowMap, systems

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


@pytest.mark.parametrize("n", [2, 12])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("HenonNet", "4 layers"),
        ("SympNet LA", "16 activations"),
        ("SympNet G", "8 layers"),
        ("HNN", "T(p) + V(q)"),
    ],
)
def test_a_rival_of_flow_maps_is_symplectic(program, name, form, n):
    rival = program("dynamics").rival_of_equal_size(name, form, n)
    J = functional.from_X(torch.eye(n // 2, dtype=torch.float64))
    w = rival.drawn(0).double()[None]
    w += 0.05 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    M = torch.autograd.functional.jacobian(
        lambda y: rival(w, y[None, None]).flatten(), w[0, :n]
    )
    assert float((M.T @ J @ M - J).abs().max() / M.abs().max() ** 2) < 1e-13


@pytest.mark.parametrize("n", [2, 4, 12, 32])
def test_rivals_have_as_many_weights_as_flow_maps_within_a_tenth(program, n):
    dynamics = program("dynamics")
    sizes = []
    for form in dynamics.OURS.values():
        ours = FlowMap(n, **form)
        sizes.append(sum(p.numel() for p in ours.parameters()))
    for name, forms in dynamics.RIVALS.items():
        for form in forms:
            w = dynamics.rival_of_equal_size(name, form, n).drawn(0)
            sizes.append(len(w))
    assert max(sizes) <= 1.1 * sizes[0]
    assert min(sizes) >= 0.9 * sizes[0]


def test_the_slope_of_an_energy_is_its_gradient(program):
    dynamics = program("dynamics")
    w = [torch.randn(3, *shape) for shape, _ in dynamics.dense(4, 7, 5, 1)[:-1]]
    w = [t.double() for t in w]
    x = torch.randn(3, 6, 4).double().requires_grad_()
    energy = dynamics.perceptron([*w, w[0].new_zeros(3, 1, 1)], x)
    (g,) = torch.autograd.grad(energy.sum(), x)
    torch.testing.assert_close(dynamics.slope(w, x), g)


def test_runge_kutta_converges_to_a_rotation(program):
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    J = functional.from_X(x.new_ones(1, 1))
    turned = program("dynamics").runge_kutta(lambda y: 0.1 * y @ J, x)
    exact = torch.linalg.matrix_exp(-0.1 * J) @ x
    torch.testing.assert_close(turned, exact, atol=1e-8, rtol=0)


def test_rivals_learn_a_rotation_each_at_its_own_rate(program, monkeypatch):
    dynamics = program("dynamics")
    monkeypatch.setattr(dynamics, "RATES", (1e-9, 1e-2))
    rival = dynamics.Rival(dynamics.dense(2, 16, 2), dynamics.perceptron)
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    pairs = torch.cat([x, x.flip(1) * torch.tensor([-1, 1])], 1)
    w = dynamics.learned(rival, pairs, 200, 50)
    errors = dynamics.error(lambda x: rival(w[:, 0], x), 2, pairs)
    assert float(errors[1]) < 0.2 < 0.9 < float(errors[0])


def test_the_energy_error_of_an_exact_flow_is_zero_and_its_path_valid(
    program, monkeypatch
):
    dynamics = program("dynamics")
    monkeypatch.setattr(dynamics, "SEEDS", range(2))
    system = systems.System(
        "turn",
        2,
        0.1,
        energy=lambda y: y.square().sum(-1) / 2,
        starts=lambda count, generator: torch.zeros(count, 2),
    )
    turn = torch.linalg.matrix_exp(
        0.1 * functional.from_X(torch.ones(1, 1, dtype=torch.float64))
    )
    states = [torch.randn(7, 2).double()]
    for _ in range(50):
        states.append(states[-1] @ turn)
    truth = torch.stack(states)
    pairs = torch.cat([truth[:-1], truth[1:]], -1).flatten(0, 1)
    scales = truth.new_zeros(2), truth.new_ones(2)
    data = dynamics.Data(system, truth, *scales, pairs, pairs, pairs, truth)
    result = dynamics.measured(lambda x: x @ turn, data, 200)
    assert max(result["energy"] + result["late"] + result["error"]) < 1e-12
    assert result["valid"] == [50, 50]
    result = dynamics.measured(lambda x: 1.01 * x @ turn, data, 200)
    assert 5 < min(result["valid"]) < max(result["valid"]) + 1 < 12
    assert min(result["late"]) > 1


def test_the_page_of_flow_maps_counts_met_and_missed_targets(
    program, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    dynamics = program("dynamics")
    monkeypatch.setattr(dynamics, "RUNS", tmp_path / "runs.jsonl")
    about = {"machine": "none"}
    lines = [
        {"name": ["depth", "8", "kepler", "0"], "result": [{"error": 2.0}]}
    ]
    lines.append(
        {"name": ["depth", "512", "kepler", "0"], "result": [{"error": 1.0}]}
    )
    for N in ("32", "128"):
        name = ["depth", N, "kepler", "0"]
        lines.append({"name": name, "result": [{"error": 1.5}]})
    for device in ("cuda", "cpu"):
        times = {"FlowMap": [1.0], "published": [10.0]}
        lines.append({"name": ["time", device], "result": [times]})
    ours = {"error": [1.0], "valid": [9.0], "energy": [1.0], "late": [1.5]}
    ours |= {"curve": {"1": 1.0}, "validation": [1.0, 2.0]}
    rival = ours | {"energy": [200.0], "validation": [3.0, 2.0, 1.0]}
    methods = {"FlowMap": dynamics.OURS, **dynamics.RIVALS}
    for method, forms in methods.items():
        for form in forms:
            row = ours if method == "FlowMap" else rival
            for name in dynamics.SYSTEMS:
                line = {"name": [method, form, name], "result": [dict(row)]}
                lines.append(line)
    for line in lines:
        line["machine"] = about
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "runs.jsonl").write_text(text)
    dynamics.write_page(tmp_path)
    result = json.loads((tmp_path / "dynamics.json").read_text())
    reached = [row[2:] for row in result["targets"]]
    assert reached == [
        ["0 of 1", "**missed**"],  # 1.5 and 1.5 are not falling
        ["6 of 6", "met"],
        ["6 of 6", "met"],
        ["0 of 6", "**missed**"],  # as long as others is not the longest
        ["6 of 6", "met"],
        ["0 of 0", "not measured on all"],
        ["0 of 1", "**missed**"],
        ["1 of 1", "not measured on all"],
    ]
    assert (tmp_path / "dynamics.png").exists()


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
