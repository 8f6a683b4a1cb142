// Outputs, gradients, norms and files of networks, for comparison with hdnn: arguments are folders.
import fs from "node:fs";
import { toFeatures } from "PLAYGROUND/core/kernels.js";
import { createNetwork } from "PLAYGROUND/core/networks.js";
import { everyNorm } from "PLAYGROUND/core/norms.js";
import { Pass } from "PLAYGROUND/core/passes.js";
import { datasets } from "PLAYGROUND/core/data.js";
import { createTrainer } from "PLAYGROUND/core/training.js";
import { fromSafetensors, toSafetensors } from "PLAYGROUND/core/safetensors.js";

const found = {};
for (const network of ["h2", "h1", "mlp"]) {
  for (const activation of ["tanh", "relu", "sigmoid", "softplus", "silu", "sin"]) {
    const data = datasets.double_moons(40, { seed: 3 });
    const trainer = createTrainer({ network, activation, data, layers: 5, T: 1.3, batch: 40, seed: 7 });
    for (let k = 0; k < 3; k++) trainer.step();
    const name = `${network}-${activation}`;
    fs.writeFileSync(`${process.argv[2]}/${name}.safetensors`, toSafetensors(trainer));
    const { net, augment } = fromSafetensors(fs.readFileSync(`${process.argv[2]}/${name}.safetensors`));
    const B = 7;
    const Y = Float64Array.from({ length: 4 * B }, (_, i) => Math.sin(1 + 3 * i));
    const pass = new Pass(net, B);
    toFeatures(Y, 4, B, pass.states);
    const from = pass.forward(B);
    const end = Array.from(pass.states.slice(from, from + 4 * B));
    pass.g.fill(1);
    pass.backward();
    const weights = Object.fromEntries(Object.entries(pass.gradients).map(([k, v]) => [k, [...v]]));
    found[name] = {
      Y: [...Y], end, start: [...pass.g], weights, norms: [...everyNorm(net, Y, B)],
      x: [...data.x], probabilities: [...trainer.predict(data.x)],
    };
  }
}
// Residual networks are not hdnn's: PyTorch computes them in the test.
for (const network of ["residual", "prenorm", "scaled", "rezero"]) {
  const net = createNetwork({ network, layers: 5, seed: 3 });
  net.weights.a?.fill(0.3);
  const B = 7;
  const Y = Float64Array.from({ length: 4 * B }, (_, i) => Math.sin(1 + 3 * i));
  const pass = new Pass(net, B);
  toFeatures(Y, 4, B, pass.states);
  const from = pass.forward(B);
  const end = Array.from(pass.states.slice(from, from + 4 * B));
  pass.g.fill(1);
  pass.backward();
  const listed = (arrays) => Object.fromEntries(Object.entries(arrays).map(([k, v]) => [k, [...v]]));
  found[network] = {
    Y: [...Y], end, start: [...pass.g], weights: listed(net.weights), gradients: listed(pass.gradients),
  };
}
found.orthogonal = [...createNetwork({ network: "orthogonal", layers: 5, init: "paper" }).weights.K];
const data = datasets.swiss_roll(2000, {});
const trainer = createTrainer({ data, layers: 32 });
for (let k = 0; k < 700; k++) trainer.step();
const mlp = createTrainer({ network: "mlp", data, layers: 32 });
found.learned = trainer.evaluate(data.x, data.t);
found.smallest = [trainer, mlp].map((each) => Math.min(...each.norms(32).min));
process.stdout.write(JSON.stringify(found));
