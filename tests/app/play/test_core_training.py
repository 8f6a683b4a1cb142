"""Training in the playground is that of hdnn, and it learns what it is there to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdnn
from hdnn import training
from hdnn.networks import BY_NAME
from node import run_node

HERE = Path(__file__).parent
CORE = Path(hdnn.__file__).parent / "app" / "play" / "core" / "index.js"
STEPS = 7
NETWORKS = ("h2", "h1", "verlet", "ms1", "ms2", "ms3", "mlp")
OPTIONS = [
    *[(name, "adam", "newton") for name in NETWORKS],
    ("h2", "sgd", "newton"),
    ("h2", "adam", "joint"),
    ("mlp", "sgd", "joint"),
]


def model_of(name: str, seed: int) -> hdnn.Model:
    g = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": g}
    steps = {} if name == "mlp" else {"T": 2.4}
    net = BY_NAME[name](4, 6, init="paper", **steps, **options)
    return hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **options))


def test_a_training_is_that_of_hdnn_step_by_step(tmp_path):
    """All data are one minibatch, so that their order does not matter."""
    points = hdnn.data.planar.double_moons(240, seed=3, dtype=torch.float64)
    x, t = points.x_train, points.t_train
    asked, models = [], []
    for k, (name, optimizer, solver) in enumerate(OPTIONS):
        model, before, after = model_of(name, k), tmp_path / f"{k}", tmp_path / f"{k}.after"
        hdnn.save(model, before)
        names = {"optimiser": optimizer, "solver": solver, "before": f"{before}"}
        sizes = {"batch": len(x), "steps": STEPS, "count": STEPS, "rate": 0.05}
        data = {"x": x.flatten().tolist(), "t": t.tolist()}
        asked.append({**names, **sizes, **data, "after": f"{after}"})
        models.append((model, after))
    file = tmp_path / "asked.json"
    file.write_text(json.dumps(asked))
    assert run_node(HERE / "core_training.mjs", CORE, file) == ""
    for (model, after), (name, optimizer, solver) in zip(models, OPTIONS, strict=True):
        training.fit(
            *(model, x, t),
            epochs=STEPS,
            batch=len(x),
            learning_rate=0.05,
            optimizer=optimizer,
            solver=solver,
            progress=False,
        )
        found = hdnn.load(after)
        for key, value in model.state_dict().items():
            close = torch.allclose(found.state_dict()[key], value, rtol=1e-7, atol=1e-7)
            assert close, (name, optimizer, solver, key)


LEARN = """
import { pathToFileURL } from "node:url";
const { createTrainer, datasets } = await import(pathToFileURL(process.argv[1]).href);
const { x, t } = datasets.swiss_roll(8000, { seed: 5 });
const half = (k) => ({
  x: x.filter((_, i) => (i >> 1) % 2 === k),
  t: t.filter((_, i) => i % 2 === k),
});
const [train, test] = [half(0), half(1)];
const found = {};
for (const network of ["h2", "mlp"]) {
  const trainer = createTrainer({ network, layers: 64, data: train, seed: 5 });
  for (let k = 0; k < 800; k++) trainer.step();
  const { accuracy, loss } = trainer.evaluate(test.x, test.t);
  const { min, median, max } = trainer.norms(64);
  const right = trainer.predict(test.x).filter((p, i) => p > 0.5 === test.t[i] > 0);
  const least = Math.min(...min);
  const ordered = min.every((low, j) => low <= median[j] && median[j] <= max[j]);
  const steps = trainer.stepCount;
  found[network] = { accuracy, loss, right: right.length, least, ordered, steps };
}
process.stdout.write(JSON.stringify(found));
"""


@pytest.mark.slow
def test_64_layers_of_h2_learn_the_swiss_roll_and_those_of_a_perceptron_do_not():
    found = json.loads(run_node("--input-type=module", "--eval", LEARN, CORE))
    assert found["h2"]["accuracy"] == 1
    assert found["h2"]["right"] == 4000
    assert found["h2"]["least"] >= 1 - 1e-9
    assert found["mlp"]["accuracy"] < 0.9
    assert found["mlp"]["least"] < 1e-6
    assert found["h2"]["ordered"]
    assert found["h2"]["steps"] == 800


RATES = """
import { pathToFileURL } from "node:url";
const { createTrainer, datasets } = await import(pathToFileURL(process.argv[1]).href);
const data = datasets.double_moons(100, { seed: 1 });
const trainer = createTrainer({ layers: 2, data, steps: 10, rate: 0.04 });
const rates = [trainer.rate];
for (let k = 0; k < 10; k++) trainer.step();
rates.push(trainer.rate);
trainer.setRate(0.02);
rates.push(trainer.rate);
const twin = createTrainer({ layers: 2, data, steps: 10, rate: 0.04 });
for (let k = 0; k < 10; k++) twin.step();
const message = (f) => { try { f(); } catch (error) { return error.message; } };
const wild = createTrainer({ data, activation: "relu", layers: 8, optimiser: "sgd", rate: 1e200 });
process.stdout.write(JSON.stringify({
  rates,
  same: twin.loss === trainer.loss,
  messages: [
    message(() => createTrainer({ data, network: "h3" })),
    message(() => createTrainer({ data, network: "h2", features: 5 })),
    message(() => createTrainer({ data, activation: "tahn" })),
    message(() => createTrainer({ data, features: 16 })),
    message(() => createTrainer({ data, layers: 0 })),
    message(() => createTrainer({ data, T: -1 })),
    message(() => createTrainer({ data, rate: NaN })),
    message(() => createTrainer({ data, batch: 0.5 })),
    message(() => createTrainer({ data, optimiser: "lion" })),
    message(() => createTrainer({ data, solver: "none" })),
    message(() => createTrainer({ data, init: "zero" })),
    message(() => createTrainer({ data, network: "mlp", features: 1 })),
    message(() => createTrainer({ data: { x: data.x, t: [] } })),
    message(() => trainer.setRate(0)),
    message(() => { for (let k = 0; k < 3; k++) wild.step(); }),
  ],
}));
"""


def test_rates_fall_and_start_anew_and_options_that_are_wrong_are_named():
    found = json.loads(run_node("--input-type=module", "--eval", RATES, CORE))
    assert found["rates"] == [0.04, 0.0004, 0.02]
    assert found["same"]
    expected = [
        "The network h3 is not known; choose one of h2, h1, verlet, ms1, ms2, ms3, mlp.",
        "H2 splits its features into two halves, so their number must be even, but it is 5.",
        "The activation tahn is not known; choose one of tanh, relu, sigmoid, softplus, gelu, "
        "silu, sin.",
        "The number of features must be a whole number from 1 to 8, but it is 16.",
        "The number of layers must be a whole number from 1 to 1024, but it is 0.",
        "The step h = T/N must be a positive number, but it is -0.015625.",
        "The rate must be a positive number, but it is NaN.",
        "The batch must be a whole number above 0, but it is 0.5.",
        "The optimiser lion is not known; choose one of adam, sgd.",
        "The solver none is not known; choose one of newton, joint.",
        "The init zero is not known; choose one of paper, scaled.",
        "Two inputs do not fit into 1 features at the places 0 and 0; take at least 2 features.",
        "The data must be points x, two numbers each, with as many classes t.",
        "The rate must be a positive number, but it is 0.",
        "The training diverged in step 2; take a smaller rate.",
    ]
    assert found["messages"] == expected
