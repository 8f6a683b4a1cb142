/**
 * The networks that the page offers: what their layers do, and their weights by hdnn's names.
 *
 * A layer is a sequence of moves. A move reads one part of the state, u, and moves another, v:
 *
 *     adjoint   v += f h K^T sigma(K u + b)
 *     skew      v += f h J K^T sigma(K u + b)    with J = [[0, -I], [I, 0]]
 *     bare      v += f h sigma(K u + b)
 *     replace   v  =     sigma(K u + b)
 *
 * where f is the fraction of the step h, with its sign. The parts are p and q, the halves of the
 * state, or y, all of it.
 */

import { MONOTONE, activationOf } from "./activations.js";
import { createRandom } from "./random.js";

export const MOST_FEATURES = 8;
export const MOST_LAYERS = 1024;
export const INITS = ["paper", "scaled"];
const DEFAULT_T = 2.4;

const ALWAYS = "norm(dy_N/dy_j) >= 1 at any depth, for any weights and any activation";
const IF_MONOTONE =
  "norm(dy_N/dy_j) >= 1 at any depth, for any weights and an activation that never decreases";

const moveP = (K, b, f, form = "adjoint", transposed = false) =>
  ({ u: "q", v: "p", K, b, f, form, transposed });
const moveQ = (K, b, f, form = "adjoint", transposed = false) =>
  ({ u: "p", v: "q", K, b, f, form, transposed });
const moveY = (form) => [{ u: "y", v: "y", K: "K", b: "b", f: 1, form, transposed: false }];

const HALVES = { K_p: "mm", K_q: "mm", b_p: "m", b_q: "m" };
const WHOLE = { K: "nn", b: "n" };

export const KINDS = {
  h2: {
    title: "H2",
    theorem: ALWAYS,
    weights: HALVES,
    moves: [moveP("K_q", "b_q", -1), moveQ("K_p", "b_p", 1)],
  },
  h1: { title: "H1", theorem: IF_MONOTONE, weights: WHOLE, moves: moveY("skew"), even: true },
  verlet: {
    title: "Verlet",
    theorem: ALWAYS,
    weights: HALVES,
    moves: [moveP("K_q", "b_q", -0.5), moveQ("K_p", "b_p", 1), moveP("K_q", "b_q", -0.5)],
  },
  ms1: {
    title: "MS1",
    theorem: ALWAYS,
    weights: { K_0: "mm", b_1: "m", b_2: "m" },
    moves: [moveQ("K_0", "b_1", -1, "bare", true), moveP("K_0", "b_2", 1, "bare")],
  },
  ms2: {
    title: "MS2",
    theorem: IF_MONOTONE,
    weights: { K_upper: "u", b: "n" },
    moves: moveY("bare"),
  },
  ms3: {
    title: "MS3",
    theorem: ALWAYS,
    weights: { K_1: "mm", K_2: "mm", b_1: "m", b_2: "m" },
    moves: [moveP("K_1", "b_1", 1), moveQ("K_2", "b_2", -1)],
  },
  mlp: { title: "MLP", theorem: null, weights: WHOLE, moves: moveY("replace") },
};

export const NETWORKS = Object.entries(KINDS).map(([id, { title, theorem }]) =>
  ({ id, title, theorem }));

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

/** The shapes of all weights, as in hdnn's state_dict. */
export function shapesOf(network, features, layers) {
  const sizes = { n: features, m: features / 2, u: (features * (features - 1)) / 2 };
  return Object.fromEntries(
    Object.entries(kindOf(network).weights).map(([name, form]) =>
      [name, [layers, ...[...form].map((letter) => sizes[letter])]]),
  );
}

/**
 * A network with random weights: "paper" draws all from N(0, 1), "scaled" draws K from N(0, 1/n)
 * with b = 0. The step is h = T/N.
 */
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
  if (!INITS.includes(init)) {
    throw new Error(`The init ${init} is not known; choose one of ${INITS.join(", ")}.`);
  }
  const random = createRandom(seed);
  const scale = init === "paper" ? 1 : 1 / Math.sqrt(features);
  for (const [name, values] of Object.entries(net.weights)) {
    if (name[0] === "b" && init === "scaled") continue;
    for (let i = 0; i < values.length; i++) values[i] = scale * random.normal();
  }
  return net;
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
  if (network !== "mlp" && !(h > 0 && Number.isFinite(h))) {
    throw new Error(`The step h = T/N must be a positive number, but it is ${h}.`);
  }
  const shapes = shapesOf(network, features, layers);
  const weights = {};
  for (const [name, shape] of Object.entries(shapes)) {
    weights[name] = new Float64Array(shape.reduce((a, b) => a * b, 1));
  }
  return { network, features, layers, activation, h: network === "mlp" ? 1 : h, weights, shapes };
}

function checkWhole(name, value, most) {
  if (!Number.isInteger(value) || value < 1 || value > most) {
    throw new Error(`The number of ${name} must be a whole number from 1 to ${most}, ` +
      `but it is ${value}.`);
  }
}
