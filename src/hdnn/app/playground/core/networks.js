/**
 * The networks of the page. A layer is a sequence of moves, each of which reads u and moves v:
 *
 *     adjoint   v += f h K^T sigma(K u + b)
 *     skew      v += f h J K^T sigma(K u + b)    with J = [[0, -I], [I, 0]]
 *     residual  v +=   a sigma(K u + b)          with a = 1, or a weight of each layer
 *     replace   v  =     sigma(K u + b)
 *
 * Where a move is `normed`, u has mean 0 and variance 1; where it is `damped` too, variance 1 / (j + 1) in layer j.
 */

import { MONOTONE, activationOf } from "./activations.js";
import { addMultiple } from "./kernels.js";
import { createRandom } from "./random.js";

const MOST_FEATURES = 8;
const MOST_LAYERS = 1024;
const DEFAULT_T = 2.4;

const ALWAYS = "norm(dy_N/dy_j) >= 1 at any depth, for any weights and any activation";
const IF_MONOTONE =
  "norm(dy_N/dy_j) >= 1 at any depth, for any weights and an activation that never decreases";

const moveP = { u: "q", v: "p", K: "K_q", b: "b_q", f: -1, form: "adjoint" };
const moveQ = { u: "p", v: "q", K: "K_p", b: "b_p", f: 1, form: "adjoint" };
const moveY = (form, more) => [{ u: "y", v: "y", K: "K", b: "b", f: 1, form, ...more }];

const HALVES = { K_p: "mm", K_q: "mm", b_p: "m", b_q: "m" };
const WHOLE = { K: "nn", b: "n" };

export const KINDS = {
  h2: { title: "H2", theorem: ALWAYS, weights: HALVES, moves: [moveP, moveQ] },
  h1: { title: "H1", theorem: IF_MONOTONE, weights: WHOLE, moves: moveY("skew"), even: true },
  mlp: { title: "Perceptron", theorem: null, weights: WHOLE, moves: moveY("replace") },
  orthogonal: { title: "Orthogonal perceptron", theorem: null, weights: WHOLE, moves: moveY("replace") },
  residual: { title: "Residual", theorem: null, weights: WHOLE, moves: moveY("residual") },
  prenorm: { title: "Pre-norm residual", theorem: null, weights: WHOLE, moves: moveY("residual", { normed: true }) },
  scaled: { title: "LayerNorm scaling", theorem: null, weights: WHOLE, moves: moveY("residual", { normed: true, damped: true }) },
  rezero: { title: "ReZero", theorem: null, weights: { ...WHOLE, a: "" }, moves: moveY("residual", { a: "a" }) },
};

/** What is promised of the gradients with that activation, or null. */
export function guarantee(network, activation) {
  const { theorem } = kindOf(network);
  return theorem === IF_MONOTONE && !MONOTONE.includes(activation) ? null : theorem;
}

export function kindOf(network) {
  if (!Object.hasOwn(KINDS, network)) {
    const known = Object.keys(KINDS).join(", ");
    throw new Error(`The network ${network} is not known; choose one of ${known}.`);
  }
  return KINDS[network];
}

/** Whether the network splits its state into (p, q), so that n must be even. */
export function splits(network) {
  const { moves, even } = kindOf(network);
  return Boolean(even) || moves[0].u !== "y";
}

/** Whether a layer is a time step of length h, so that hdnn has the network too. */
export function hasStep(network) {
  return ["adjoint", "skew"].includes(kindOf(network).moves[0].form);
}

/** The shapes of all weights, as in hdnn's state_dict. */
export function shapesOf(network, features, layers) {
  const sizes = { n: features, m: features / 2 };
  return Object.fromEntries(
    Object.entries(kindOf(network).weights).map(([name, form]) =>
      [name, [layers, ...[...form].map((letter) => sizes[letter])]]),
  );
}

/** Random weights: "paper" draws all from N(0, 1), "scaled" K from N(0, 1/n) with b = 0; a is 0. */
export function createNetwork({
  network = "h2",
  features = 4,
  layers = 64,
  activation = "tanh",
  T = DEFAULT_T,
  seed = 0,
  init = "scaled",
} = {}) {
  const net = emptyNetwork({ network, features, layers, activation, h: T / layers });
  const random = createRandom(seed);
  const scale = init === "paper" ? 1 : 1 / Math.sqrt(features);
  for (const [name, values] of Object.entries(net.weights)) {
    if (name === "a" || (name[0] === "b" && init === "scaled")) continue;
    for (let i = 0; i < values.length; i++) values[i] = scale * random.normal();
  }
  if (network === "orthogonal") {
    orthogonalise(net.weights.K, features);
    net.weights.b.fill(0);
  }
  return net;
}

/** Make the rows of each K (n, n) orthonormal, one after the other. */
function orthogonalise(K, n) {
  for (let row = 0; row < K.length; row += n) {
    const own = K.subarray(row, row + n);
    for (let other = row - (row % (n * n)); other < row; other += n) {
      const along = own.reduce((sum, value, c) => sum + value * K[other + c], 0);
      addMultiple(-along, K, other, own, 0, n);
    }
    addMultiple(1 / Math.hypot(...own) - 1, own, 0, own, 0, n);
  }
}

/** A network whose weights are all zero. */
export function emptyNetwork({ network, features, layers, activation, h }) {
  kindOf(network);
  activationOf(activation);
  checkWhole("features", features, MOST_FEATURES);
  checkWhole("layers", layers, MOST_LAYERS);
  if (splits(network) && features % 2) {
    throw new Error(`${KINDS[network].title} splits its features into two halves, so their ` +
      `number must be even, but it is ${features}.`);
  }
  if (hasStep(network) && !(h > 0 && Number.isFinite(h))) {
    throw new Error(`The step h = T/N must be a positive number, but it is ${h}.`);
  }
  const shapes = shapesOf(network, features, layers);
  const weights = {};
  for (const [name, shape] of Object.entries(shapes)) {
    weights[name] = new Float64Array(shape.reduce((a, b) => a * b, 1));
  }
  return { network, features, layers, activation, h: hasStep(network) ? h : 1, weights, shapes };
}

function checkWhole(name, value, most) {
  if (!Number.isInteger(value) || value < 1 || value > most) {
    throw new Error(`The number of ${name} must be a whole number from 1 to ${most}, ` +
      `but it is ${value}.`);
  }
}
