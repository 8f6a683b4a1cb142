/** Training as hdnn.training.fit does it: solve the output layer, take a step, repeat. */

import { HeadSolver, createHead } from "./head.js";
import { addMultiple } from "./kernels.js";
import { createAugment, createRoom, embed, evaluate, featuresOf, predict } from "./model.js";
import { createNetwork, hasStep } from "./networks.js";
import { norms } from "./norms.js";
import { createOptimiser } from "./optimisers.js";
import { Pass } from "./passes.js";
import { createRandom } from "./random.js";

const NEWTON_STEPS = 5; // the next minibatch has another optimum anyway
const REFIT_STEPS = 50;
const LEAST = 0.01; // of the rate, when the cosine has come to its end

/** A trainer, which is a model too, of data {x, t}; it begins from a model, or random weights. */
export function createTrainer({
  network = "h2",
  features = 4,
  layers = 64,
  activation = "tanh",
  T = 2.4,
  init = "paper",
  model = null,
  data,
  rate = 0.05,
  batch = 125,
  steps = 1600,
  optimiser = "adam",
  ridge = 1e-4,
  smoothness = 5e-4,
  seed = 0,
}) {
  const net = model ? copied(model.net)
    : createNetwork({ network, features, layers, activation, T, init, seed });
  const augment = model ? model.augment : createAugment(features);
  const options = { rate, batch, steps, ridge, smoothness };
  const random = createRandom(seed + 1);
  return new Trainer(net, augment, model?.head, data, options, optimiser, random);
}

class Trainer {
  constructor(net, augment, head, data, options, optimiser, random) {
    const count = data.t.length;
    this.net = net;
    this.augment = augment;
    this.data = data;
    this.stepCount = 0;
    this.loss = NaN; // of the last minibatch
    this.accuracy = NaN;
    this._options = options;
    this._random = random;
    this._batch = Math.min(options.batch, count);
    this._order = Uint32Array.from({ length: count }, (_, i) => i);
    this._next = count; // where the next minibatch begins; an epoch is over at `count`
    this._pass = new Pass(net, this._batch);
    this._room = null;
    this._t = new Uint8Array(this._batch);
    this._head = createHead(augment.features);
    if (head) copyHead(head, this._head);
    this._solver = new HeadSolver(this._head, this._batch);
    this._whole = null; // the head for all data, once it is asked for
    this._fitted = head ? 0 : -1; // the step after which that was found
    if (head) this._whole = { head: copyHead(head, createHead(augment.features)) };
    this._gradients = Object.keys(net.weights).map((name) => this._pass.gradients[name]);
    this._began = 0; // the step at which the cosine began
    this._optimiser = createOptimiser(optimiser, Object.values(net.weights));
  }

  /** One minibatch. */
  step() {
    const { _pass: pass, _solver: solver, _options: options, data, _t: t } = this;
    const count = data.t.length;
    if (this._next >= count) {
      this._random.shuffle(this._order);
      this._next = 0;
    }
    const B = Math.min(this._batch, count - this._next);
    for (let i = 0; i < B; i++) t[i] = data.t[this._order[this._next + i]];
    embed(this.augment, data.x, this._next, B, pass.states, this._order);
    this._next += B;
    const from = pass.forward(B);
    solver.newton(pass.states, from, t, B, options.ridge, NEWTON_STEPS);
    this.loss = solver.measure(pass.states, from, t, B);
    this.accuracy = solver.correct;
    if (!Number.isFinite(this.loss)) {
      throw new Error(`The training diverged in step ${this.stepCount + 1}; take a smaller rate.`);
    }
    solver.pullBack(pass.g, B);
    pass.backward();
    this._smooth();
    this._optimiser.descend(this._gradients, this.rate);
    this.stepCount += 1;
    return this.loss;
  }

  /** The rate of the next step: it falls as a cosine, and stays small after that. */
  get rate() {
    const done = Math.min(1, (this.stepCount - this._began) / this._options.steps);
    return this._options.rate * Math.max(LEAST, 0.5 * (1 + Math.cos(Math.PI * done)));
  }

  /** Set the rate that the cosine starts from; where it has come to its end, it starts anew. */
  setRate(rate) {
    this._options.rate = rate;
    if (this.stepCount - this._began >= this._options.steps) this._began = this.stepCount;
  }

  /** The output layer, fitted to all data. */
  get head() {
    if (this._fitted !== this.stepCount) this._refit();
    return this._whole.head;
  }

  /** The mean cross-entropy at given points, and the fraction of them that are right. */
  evaluate(x, t) {
    return evaluate(this, x, t, this._place());
  }

  /** The probability of class 1 at given points. */
  predict(x) {
    return predict(this, x, this._place());
  }

  /** Norms of dy_N/dy_j over so many of the data: see `norms`. */
  norms(count = 64) {
    const { data, augment } = this;
    const B = Math.min(count, data.t.length);
    const n = augment.features;
    const Y = new Float64Array(B * n);
    for (let i = 0; i < B; i++) {
      const from = Math.floor((i * data.t.length) / B);
      augment.positions.forEach((c, k) => {
        Y[i * n + c] = data.x[2 * from + k];
      });
    }
    return norms(this.net, Y, B);
  }

  _place() {
    this._room ??= createRoom(this);
    return this._room;
  }

  _refit() {
    const { data, augment } = this;
    const count = data.t.length;
    if (!this._whole?.solver) {
      const head = createHead(augment.features);
      const y = new Float64Array(augment.features * count);
      this._whole = { head, y, solver: new HeadSolver(head, count) };
    }
    const { y, solver } = this._whole;
    featuresOf(this, data.x, this._place(), y);
    solver.newton(y, 0, data.t, count, this._options.ridge, REFIT_STEPS);
    this._fitted = this.stepCount;
  }

  /** Add the gradient of alpha R_K: R_K is h/2 the sum of squared jumps from layer to layer. */
  _smooth() {
    const { net, _pass: pass } = this;
    if (!hasStep(net.network)) return; // no discretised ODE
    for (const name in net.weights) {
      const factor = this._options.smoothness * net.h;
      const w = net.weights[name];
      const g = pass.gradients[name];
      const size = w.length / net.layers;
      const jumps = w.length - size;
      addMultiple(factor, w, size, g, size, jumps);
      addMultiple(-factor, w, 0, g, size, jumps);
      addMultiple(factor, w, 0, g, 0, jumps);
      addMultiple(-factor, w, size, g, 0, jumps);
    }
  }
}

function copied(net) {
  const weights = Object.fromEntries(
    Object.entries(net.weights).map(([name, values]) => [name, values.slice()]),
  );
  return { ...net, weights };
}

function copyHead(from, to) {
  to.weight.set(from.weight);
  to.bias.set(from.bias);
  return to;
}
