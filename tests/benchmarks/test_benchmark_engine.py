"""The benchmark of the engine runs, writes what programs can read, and is fair to its rivals."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "engine.py"), *arguments], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    """The program as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("engine")


def main_of(engine: ModuleType, *arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["engine.py", *arguments])
        return engine.main()


@pytest.fixture(scope="module")
def quick(
    engine: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], str]:
    """What a quick run prints and writes."""
    out = tmp_path_factory.mktemp("benchmark")
    printed = io.StringIO()
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")  # what packages of others say about PyTorch
        assert main_of(engine, "--quick", "--out", str(out)) == 0
    return (
        printed.getvalue(),
        json.loads((out / "engine-cpu.json").read_text()),
        (out / "engine-cpu.md").read_text(),
    )


def test_a_quick_run_finds_every_figure(quick):
    printed, result, page = quick
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["machine"].split(",")[0] not in ("", "CPU", "x86_64")
    for row in result["speed"]:
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["alone"] > 0
        assert row["what"] in printed
        assert row["what"] in page
    assert {row["n"] for row in result["sweep"]} == {2, 16}
    assert result["accuracy"][0]["error"] <= 1e-5
    assert result["fixed_state"]["bit_exact"] is True
    assert result["import"]["numba_or_triton"] == []
    assert len(result["peak"]["MiB"]) == 2
    if sys.platform.startswith("linux"):
        assert result["others_cores"] >= 0
        assert "other programs took" in printed
    assert all(row["ms"] > 0 and row["MiB"] > 0 for row in result["depth"])


def test_every_rival_has_a_row_and_a_reason_if_it_does_not_run(quick):
    _, result, page = quick
    names = [row["what"] for row in result["others"]]
    assert [name.split(",")[0] for name in names] == [
        "torch.compile",
        "torch.utils.checkpoint",
        "torchdiffeq",
        "memcnn",
        "revlib",
    ]
    for row in result["others"]:
        assert row["what"] in page
        if "failed" in row:
            assert row["failed"].startswith(("does not run: ", "left out of a quick run"))
            assert "\n" not in row["failed"]
        else:
            assert row["ratio"] > 0


def test_every_row_of_a_table_has_as_many_cells_as_its_head(quick):
    for part in quick[2].split("\n\n"):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_gpu_run_says_so_in_a_sentence():
    done = program("--device", "cuda", "--quick")
    assert done.returncode == 2
    assert done.stderr == "there is no CUDA device here; use --device cpu\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--device", "tpu"], "tpu"),
        (["--seconds", "0"], "seconds"),
        (["--seconds", "nan"], "seconds"),
        (["--sec"], "argument"),
        (["--out", str(Path(__file__))], "folder"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(arguments, word, engine, capsys):
    try:
        code = main_of(engine, *arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    said = capsys.readouterr().err
    assert word in said.splitlines()[-1]
    assert "Traceback" not in said


# The contestants


@pytest.fixture(scope="module")
def rivals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rivals", FOLDER / "rivals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # what packages of others say about PyTorch
@pytest.mark.parametrize("name", ["torch.utils.checkpoint", "memcnn", "revlib"])
def test_a_rival_computes_what_the_plain_loop_does(name, rivals):
    tensors = rivals.weights("h2", 6, 5, 16, "cpu")
    expected = rivals.plain_h2(*tensors, rivals.H)
    (gradient,) = torch.autograd.grad(expected.sum(), tensors[0])
    try:
        forward, leaves = rivals.RIVALS[name](tensors)
    except ModuleNotFoundError as error:
        pytest.skip(rivals.why_not(error))
    step = rivals.step_of(forward, leaves)
    step()
    step()  # gradients start anew
    torch.testing.assert_close(forward(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad, gradient, rtol=1e-4, atol=1e-4)
    assert all(leaf.grad is not None for leaf in leaves)


def test_torchdiffeq_takes_euler_steps_of_the_same_field(rivals):
    tensors = rivals.weights("h2", 6, 5, 16, "cpu")
    try:
        forward, leaves = rivals.RIVALS["torchdiffeq, adjoint"](tensors)
    except ModuleNotFoundError as error:
        pytest.skip(rivals.why_not(error))
    y, K_p, K_q, b_p, b_q = tensors
    p, q = y.chunk(2, -1)
    for j in range(len(K_p)):
        p, q = (
            p - rivals.H * torch.tanh(q @ K_q[j].T + b_q[j]) @ K_q[j],
            q + rivals.H * torch.tanh(p @ K_p[j].T + b_p[j]) @ K_p[j],
        )
    torch.testing.assert_close(forward(), torch.cat([p, q], -1), rtol=1e-5, atol=1e-5)
    rivals.step_of(forward, leaves)()
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("kind", ["h1", "h2"])
def test_the_plain_loop_is_the_function_it_is_compared_with(kind, rivals):
    from hdnn import functional

    tensors = rivals.weights(kind, 6, 5, 4, "cpu")
    function = getattr(functional, kind)
    torch.testing.assert_close(
        rivals.PLAIN[kind](*tensors, rivals.H), function(*tensors, rivals.H), rtol=1e-5, atol=1e-5
    )
