/**
 * How fast and how well the playground's arithmetic trains, in Node.js.
 *
 *     node benchmarks/play.mjs             # speed, and 64 layers on the Swiss roll for 5 seeds
 *     node benchmarks/play.mjs speed       # speed alone
 *     node benchmarks/play.mjs train 10    # trainings alone, for so many seeds
 */

import os from "node:os";

import { datasets } from "../src/hdnn/app/playground/core/data.js";
import { createNetwork } from "../src/hdnn/app/playground/core/networks.js";
import { norms } from "../src/hdnn/app/playground/core/norms.js";
import { createTrainer } from "../src/hdnn/app/playground/core/training.js";

const LAYERS = 64;
const BATCH = 125;
const ROUNDS = 7;
const MOST_STEPS = 3200;

/** A data set as the page divides it: even indices to train on, odd ones to test with. */
function halves({ x, t }) {
  return [0, 1].map((k) => ({
    x: x.filter((_, i) => (i >> 1) % 2 === k),
    t: t.filter((_, i) => i % 2 === k),
  }));
}

function seconds(work) {
  const begin = performance.now();
  work();
  return (performance.now() - begin) / 1000;
}

/** The median of several rounds, and their spread. */
function rounds(work) {
  for (let k = 0; k < 3; k++) work();
  const times = Array.from({ length: ROUNDS }, () => seconds(work)).sort((a, b) => a - b);
  return [times[ROUNDS >> 1], times[0], times[ROUNDS - 1]];
}

function speed() {
  const [train] = halves(datasets.swiss_roll(8000));
  const count = 100;
  const rates = [];
  const trainers = ["h2", "mlp"].map((network) =>
    createTrainer({ network, layers: LAYERS, batch: BATCH, data: train, steps: 10_000 }));
  for (const trainer of trainers) {
    const [time, least, most] = rounds(() => {
      for (let k = 0; k < count; k++) trainer.step();
    });
    rates.push(count / time);
    console.log(`${trainer.net.network}, ${LAYERS} layers, 4 features, minibatch ${BATCH}: ` +
      `${(count / time).toFixed(0)} steps a second ` +
      `(${(count / most).toFixed(0)} to ${(count / least).toFixed(0)})`);
  }
  const both = 1 / rates.reduce((sum, rate) => sum + 1 / rate, 0);
  console.log(`one after the other: ${both.toFixed(0)} steps of both a second`);
  for (const [layers, features] of [[64, 4], [256, 4], [256, 8]]) {
    const net = createNetwork({ network: "h2", layers, features, init: "paper" });
    const Y = Float64Array.from({ length: 64 * features }, (_, i) => Math.sin(i));
    const [time, least, most] = rounds(() => norms(net, Y, 64));
    console.log(`norms of dy_N/dy_j, ${layers} layers, ${features} features, 64 samples: ` +
      `${(1000 * time).toFixed(0)} ms (${(1000 * least).toFixed(0)} to ${(1000 * most).toFixed(0)})`);
  }
}

function train(seeds) {
  console.log("Swiss roll, 4000 points to train on and 4000 to test with, looked at every 50 steps");
  for (const network of ["h2", "mlp"]) {
    for (let seed = 0; seed < seeds; seed++) {
      const [train, test] = halves(datasets.swiss_roll(8000, { seed }));
      const trainer = createTrainer({ network, layers: LAYERS, batch: BATCH, data: train, seed });
      let spent = 0;
      let best = 0;
      const most = network === "mlp" ? MOST_STEPS / 2 : MOST_STEPS;
      while (best < 1 && trainer.stepCount < most) {
        spent += seconds(() => {
          for (let k = 0; k < 50; k++) trainer.step();
        });
        best = Math.max(best, trainer.evaluate(test.x, test.t).accuracy);
      }
      const { min } = trainer.norms(250);
      console.log(`${network}, seed ${seed}: ${(100 * best).toFixed(2)}% after ` +
        `${trainer.stepCount} steps and ${spent.toFixed(1)} s; ` +
        `smallest norm of dy_N/dy_j ${Math.min(...min).toPrecision(6)}`);
    }
  }
}

const [what = "all", count = "5"] = process.argv.slice(2);
console.log(`Node.js ${process.version}, ${os.cpus()[0]?.model}, ${os.cpus().length} cores`);
if (what !== "train") speed();
if (what !== "speed") train(Number(count));
