"""The arithmetic of the playground is that of hdnn: outputs, gradients and norms, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdnn
from hdnn import analysis
from hdnn.networks import BY_NAME
from node import run_node

HERE = Path(__file__).parent
CORE = Path(hdnn.__file__).parent / "app" / "play" / "core" / "index.js"
NETWORKS = ("h2", "h1", "verlet", "ms1", "ms2", "ms3", "mlp")
ACTIVATIONS = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin")
SIZES = [(2, 1, 3), (4, 2, 5), (8, 7, 2), (6, 20, 3), (4, 64, 7)]  # features, layers, samples
ODD = [(1, 3, 2), (3, 5, 4), (5, 33, 3), (7, 2, 5)]  # where the state is not split


def network(name: str, n: int, N: int, activation: str, T: float) -> Any:
    options = {} if name == "mlp" else {"T": T}
    g = torch.Generator().manual_seed(17 * n + N)
    net = BY_NAME[name](
        n, N, activation=activation, dtype=torch.float64, init="scaled", generator=g, **options
    )
    scale = 1.0 if name == "mlp" else 1.5
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(scale * torch.randn(weight.shape, generator=g).double() / n**0.5)
    return net


def sizes(name: str) -> list[tuple[int, int, int]]:
    return SIZES + (ODD if name in ("ms2", "mlp") else [])


def cases(name: str) -> list[tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]]:
    made = []
    for activation in ACTIVATIONS:
        for n, N, B in sizes(name):
            T = 1.7
            net = network(name, n, N, activation, T)
            g = torch.Generator().manual_seed(N)
            y, G = torch.randn(2, B, n, generator=g, dtype=torch.float64)
            asked = {"network": name, "features": n, "layers": N, "activation": activation, "T": T}
            asked |= {"Y": y.flatten().tolist(), "G": G.flatten().tolist(), "B": B}
            state = net.state_dict()
            asked["weights"] = {k: v.flatten().tolist() for k, v in state.items()}
            made.append((net, y, G, asked))
    return made


def check_close(found: list[float], expected: torch.Tensor, what: str) -> None:
    """To 1e-9 of the largest entry."""
    wanted = expected.detach().numpy().ravel()
    given = np.array(found, dtype=float)
    assert given.shape == wanted.shape, what
    size = max(1.0, float(np.abs(wanted).max(initial=0)))
    assert float(np.abs(given - wanted).max(initial=0)) <= 1e-9 * size, what


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_gradients_and_norms_are_those_of_hdnn(name, tmp_path):
    made = cases(name)
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([asked for *_, asked in made]))
    results = json.loads(run_node(HERE / "core_vectors.mjs", CORE, file))
    assert len(results) == len(made)
    for (net, y, G, asked), found in zip(made, results, strict=True):
        what = f"{net!r}"
        y = y.clone().requires_grad_()
        out = net(y)
        out.backward(G)
        shapes = {k: list(v.shape) for k, v in net.state_dict().items()}
        assert found["shapes"] == shapes, what
        check_close(found["forward"], out, what)
        check_close(found["trajectory"], net.trajectory(y), what)
        check_close(found["y0"], y.grad, what)
        for weight, parameter in net.named_parameters():
            check_close(found["weights"][weight], parameter.grad, f"{what} {weight}")
        norms = analysis.norms(analysis.backward_sensitivity(net, y.detach())[:-1])
        expected = norms.amin(-1), norms.median(-1).values, norms.amax(-1)
        for given, wanted in zip(found["norms"], expected, strict=True):
            assert np.allclose(given, wanted, rtol=1e-9, atol=0), what
        assert np.allclose(found["single"], norms[:, 0], rtol=1e-9, atol=0), what
        assert len(found["single"]) == asked["layers"]


def test_norms_are_never_below_1_where_that_is_promised_and_vanish_in_a_perceptron():
    smallest = json.loads(run_node(HERE / "core_promises.mjs", CORE))
    for name in NETWORKS:
        for activation in ACTIVATIONS:
            least = smallest[f"{name} {activation}"]
            promise = BY_NAME[name](4, 2, activation=activation).guarantee()
            assert least["promised"] == promise.holds, (name, activation)
            if promise.holds:
                assert float(least["norm"]) >= 1 - 1e-9, (name, activation)
    assert float(smallest["mlp tanh"]["norm"]) < 1e-6


SPECTRAL = """
import { pathToFileURL } from "node:url";
import { readFileSync } from "node:fs";
const { spectralNorm } = await import(pathToFileURL(process.argv[1]).href);
const matrices = JSON.parse(readFileSync(process.argv[2], "utf8"));
const special = [[NaN, 1, 1, 1], [0, Infinity, 0, 0], [0, 0, 0, 0], [0, 5e-324, 0, 0]];
process.stdout.write(JSON.stringify({
  norms: matrices.map((A) => spectralNorm(Float64Array.from(A.flat()), A.length)),
  special: special.map((A) => String(spectralNorm(Float64Array.from(A), 2))),
}));
"""


def test_spectral_norms_are_exact_for_matrices_of_all_kinds(tmp_path):
    rng = np.random.default_rng(0)
    matrices = []
    for n in range(1, 9):
        A, B = rng.standard_normal((2, n, n))
        orthogonal = np.linalg.qr(A)[0]
        matrices += [A, 1e-200 * A, 1e150 * A, A * np.exp(10 * B), np.diag(np.exp(20 * A[0]))]
        matrices += [orthogonal, np.eye(n), np.eye(n) + 1e-9 * A, np.outer(A[0], B[0])]
        matrices += [np.eye(n) + 1e-5 * np.triu(A, 1), orthogonal + 1e-12 * B]
    file = tmp_path / "matrices.json"
    file.write_text(json.dumps([A.tolist() for A in matrices]))
    place = CORE.parent / "spectral.js"
    found = json.loads(run_node("--input-type=module", "--eval", SPECTRAL, place, file))
    expected = [np.linalg.norm(A, 2) for A in matrices]
    assert np.allclose(found["norms"], expected, rtol=1e-14, atol=0)
    assert found["special"] == ["NaN", "Infinity", "0", "5e-324"]
