"""The arithmetic of the playground against hdnn: outputs, gradients, norms, files, training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import hdnn
from hdnn.app import play
from hdnn.app.play import HERE
from node import run_node


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    script = folder / "vectors.mjs"
    source = Path(__file__).with_name("vectors.mjs").read_text("utf-8")
    script.write_text(
        source.replace("PLAYGROUND", HERE.as_uri()), encoding="utf-8"
    )
    return folder, json.loads(run_node(script, folder))


NAMES = [
    f"{network}-{activation}"
    for network in ("h2", "h1", "mlp")
    for activation in ("tanh", "relu", "sigmoid", "softplus", "silu", "sin")
]


@pytest.mark.parametrize("name", NAMES)
def test_hdnn_loads_a_download_and_computes_the_same(results, name):
    folder, found = results
    values = {
        key: torch.tensor(v, dtype=torch.float64)
        for key, v in found[name].items()
        if key != "weights"
    }
    model = hdnn.io.load(folder / f"{name}.safetensors")
    x = values["x"].reshape(-1, 2)
    probabilities = model.head.probabilities(model(x))[:, 1].detach()
    torch.testing.assert_close(
        probabilities, values["probabilities"], rtol=0, atol=1e-12
    )
    net = model.net
    y = values["Y"].reshape(-1, 4).requires_grad_()
    end = net(y)
    torch.testing.assert_close(
        end.T.flatten(), values["end"], rtol=1e-12, atol=1e-12
    )
    end.sum().backward()
    torch.testing.assert_close(
        y.grad.T.flatten(), values["start"], rtol=1e-11, atol=1e-11
    )
    for weight, gradient in found[name]["weights"].items():
        expected = net.get_parameter(weight).grad.flatten()
        torch.testing.assert_close(
            torch.tensor(gradient, dtype=torch.float64),
            expected,
            rtol=1e-10,
            atol=1e-10,
        )
    norms = hdnn.analysis.norms(
        hdnn.analysis.backward_sensitivity(net, y.detach())
    )[:-1]
    torch.testing.assert_close(
        values["norms"].view(5, -1), norms, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("network", ["residual", "prenorm", "scaled", "rezero"])
def test_residual_networks_are_those_of_pytorch(results, network):
    _, found = results
    values = found[network]
    tensor = partial(torch.tensor, dtype=torch.float64)
    y = tensor(values["Y"]).view(-1, 4).requires_grad_()
    K = tensor(values["weights"]["K"]).view(5, 4, 4).requires_grad_()
    b = tensor(values["weights"]["b"]).view(5, 4).requires_grad_()
    gain = tensor(values["weights"].get("a", [1.0] * 5)).requires_grad_()
    state = y
    for layer in range(5):
        source = state
        if network in ("prenorm", "scaled"):
            source = torch.nn.functional.layer_norm(state, (4,))
        if network == "scaled":
            source = source / (layer + 1) ** 0.5
        move = torch.tanh(source @ K[layer].T + b[layer])
        state = state + gain[layer] * move
    state.sum().backward()
    for ours, theirs in (
        (values["end"], state.detach().T),
        (values["start"], y.grad.T),
        (values["gradients"]["K"], K.grad),
        (values["gradients"]["b"], b.grad),
        (values["gradients"].get("a", gain.grad.tolist()), gain.grad),
    ):
        torch.testing.assert_close(
            tensor(ours), theirs.flatten(), rtol=1e-10, atol=1e-10
        )


def test_orthogonal_perceptrons_begin_with_orthogonal_weights(results):
    K = torch.tensor(results[1]["orthogonal"], dtype=torch.float64).view(
        5, 4, 4
    )
    torch.testing.assert_close(K @ K.mT, torch.eye(4).double().expand(5, 4, 4))


def test_h2_learns_the_swiss_roll_and_gradients_of_the_mlp_vanish(results):
    _, found = results
    assert found["learned"]["accuracy"] > 0.95
    assert found["smallest"][0] >= 1
    assert found["smallest"][1] < 1e-5


def test_a_file_of_hdnn_opens_and_a_damaged_one_is_refused(tmp_path):
    model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 3), hdnn.SigmoidHead(4))
    hdnn.io.save(model, tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "flipped.safetensors").write_bytes(
        content[:-1] + bytes([content[-1] ^ 1])
    )
    (tmp_path / "cut.safetensors").write_bytes(content[:-3])
    many = hdnn.Model(hdnn.Augment(3, 4), hdnn.H2(4, 3), hdnn.SigmoidHead(4))
    hdnn.io.save(many, tmp_path / "many.safetensors")
    implicit = hdnn.Model(
        hdnn.Augment(2, 4), hdnn.ImplicitH2(4, 3), hdnn.SigmoidHead(4)
    )
    hdnn.io.save(implicit, tmp_path / "implicit.safetensors")
    script = tmp_path / "open.mjs"
    script.write_text(f"""
        import fs from "node:fs";
        import {{ fromSafetensors }} from "{HERE.as_uri()}/core/safetensors.js";
        const said = {{}};
        for (const name of ["good", "flipped", "cut", "many", "implicit"]) {{
          try {{
            const model = fromSafetensors(fs.readFileSync("{tmp_path}/" + name + ".safetensors"));
            said[name] = model.net.network;
          }} catch (error) {{ said[name] = error.message; }}
        }}
        process.stdout.write(JSON.stringify(said));
    """)
    said = json.loads(run_node(script))
    assert said["good"] == "h2"
    assert "checksum" in said["flipped"]
    assert "damaged" in said["cut"]
    assert "2 inputs" in said["many"]
    assert "does not offer" in said["implicit"]


def test_no_name_is_declared_by_two_joined_scripts(tmp_path):
    """One scope holds all scripts of a bundle: a name that is declared twice is a syntax error."""
    for name in ("ui/main.js", "worker.js"):
        script = tmp_path / "joined.js"
        script.write_text(play.join(HERE / name), encoding="utf-8")
        run_node("--check", script)
