/** Forward and backward passes through all layers, with gradients in closed form. */

import { activationOf } from "./activations.js";
import {
  addAdjoint, addMultiple, addOuter, addSums, affine, pulledBack, scaledProduct, toFeatures,
  toSamples,
} from "./kernels.js";
import { kindOf } from "./networks.js";

/**
 * Room for passes of at most `most` samples, so that a pass itself allocates nothing.
 *
 * With `stored`, all states and slopes are kept: then `backward` can follow `forward`. Without it
 * there is only the last state.
 */
export class Pass {
  constructor(net, most, { stored = true } = {}) {
    const n = net.features;
    this.net = net;
    this.most = most;
    this.stored = stored;
    this.sigma = activationOf(net.activation);
    this.moves = kindOf(net.network).moves.map((move) => laidOut(net, move));
    this.rows = this.moves[0].rows;
    this.count = net.layers * this.moves.length;
    this.states = new Float64Array((stored ? this.count + 1 : 1) * n * most);
    this.s = new Float64Array((stored ? this.count : 1) * this.rows * most);
    this.d = new Float64Array(this.s.length);
    this.z = new Float64Array(this.rows * most);
    this.turned = new Float64Array(n * most);
    this.g = new Float64Array(n * most);
    this.skew = net.network === "ms2" ? new Float64Array(net.layers * n * n) : null;
    this.dSkew = this.skew && new Float64Array(this.skew.length);
    this.gradients = Object.fromEntries(
      Object.entries(net.weights).map(([name, values]) => [name, new Float64Array(values.length)]),
    );
    this.B = 0;
  }

  /** Where y_j begins in `states`; without `stored`, that is the last state for any j. */
  at(j) {
    return this.stored ? j * this.moves.length * this.net.features * this.B : 0;
  }

  /** From y_0 (n, B), which must lie at the start of `states`, to y_N. */
  forward(B) {
    const { net, moves, states, s, d, stored } = this;
    const { h } = net;
    const size = net.features * B;
    this.B = B;
    if (this.skew) fillSkew(net.weights.K_upper, net.features, net.layers, this.skew);
    let from = 0;
    let at = 0;
    for (let j = 0; j < net.layers; j++) {
      for (const move of moves) {
        if (stored) {
          states.copyWithin(from + size, from, from + size);
          from += size;
        }
        const { rows, cols, stride, step, form, f } = move;
        const K = this.skew ?? net.weights[move.K];
        const k = j * rows * cols;
        const u = from + move.u * B;
        const v = from + move.v * B;
        affine(K, k, stride, step, net.weights[move.b], j * rows, rows, cols, states, u, s, at, B);
        this.sigma(s, s, d, at, at + rows * B);
        if (form === "adjoint") {
          addAdjoint(K, k, stride, step, rows, cols, f * h, s, at, states, v, B);
        } else if (form === "skew") {
          const half = cols / 2;
          addAdjoint(K, k + half, stride, step, rows, half, -f * h, s, at, states, v, B);
          addAdjoint(K, k, stride, step, rows, half, f * h, s, at, states, v + half * B, B);
        } else if (form === "bare") {
          addMultiple(f * h, s, at, states, v, rows * B);
        } else {
          for (let i = 0; i < rows * B; i++) states[v + i] = s[at + i];
        }
        if (stored) at += rows * B;
      }
    }
    return from;
  }

  /** From dL/dy_N in `g` to dL/dy_0 there, and to the gradients of all weights. */
  backward() {
    for (const values of Object.values(this.gradients)) values.fill(0);
    this.dSkew?.fill(0);
    for (let j = this.net.layers - 1; j >= 0; j--) this.backwardLayer(j, this.g, true);
    if (this.dSkew) {
      const { features, layers } = this.net;
      addUpper(this.dSkew, features, layers, this.gradients.K_upper);
    }
  }

  /** From dL/dy_{j+1} to dL/dy_j, in place, in any `g` (n, B). */
  backwardLayer(j, g, ofWeights) {
    const { net, moves, states, s, d, z, B } = this;
    const { h } = net;
    for (let t = moves.length - 1; t >= 0; t--) {
      const move = moves[t];
      const { rows, cols, stride, step, form, f } = move;
      const turn = j * moves.length + t;
      const at = turn * rows * B;
      const K = this.skew ?? net.weights[move.K];
      const k = j * rows * cols;
      const u = move.u * B;
      const v = move.v * B;
      let w = g; // times which K^T sigma(K u + b) enters the loss
      let from = v;
      if (form === "skew") {
        w = this.turned;
        from = 0;
        turnedBack(g, cols, B, w);
      }
      if (form === "adjoint" || form === "skew") {
        pulledBack(K, k, stride, step, rows, cols, f * h, w, from, d, at, z, B);
      } else {
        scaledProduct(form === "bare" ? f * h : 1, g, v, d, at, z, rows * B);
      }
      if (ofWeights) {
        const dK = this.dSkew ?? this.gradients[move.K];
        const source = turn * net.features * B + u;
        addOuter(dK, k, stride, step, rows, cols, 1, z, 0, states, source, B);
        if (form === "adjoint" || form === "skew") {
          addOuter(dK, k, stride, step, rows, cols, f * h, s, at, w, from, B);
        }
        addSums(this.gradients[move.b], j * rows, rows, z, B);
      }
      if (form === "replace") g.fill(0, v, v + rows * B);
      addAdjoint(K, k, stride, step, rows, cols, 1, z, 0, g, u, B);
    }
  }
}

/** A move with the sizes and places that its network gives it. */
function laidOut(net, move) {
  const n = net.features;
  const size = move.u === "y" ? n : n / 2;
  const place = { p: 0, q: n / 2, y: 0 };
  return {
    ...move,
    u: place[move.u],
    v: place[move.v],
    rows: size,
    cols: size,
    stride: move.transposed ? 1 : size,
    step: move.transposed ? size : 1,
  };
}

/** J^T g = (g_q, -g_p) */
function turnedBack(g, n, B, out) {
  const half = (n / 2) * B;
  for (let i = 0; i < half; i++) {
    out[i] = g[half + i];
    out[half + i] = -g[i];
  }
}

/** The skew-symmetric K (N, n, n) whose entries above the diagonal are given row by row. */
function fillSkew(upper, n, layers, K) {
  for (let j = 0, i = 0; j < layers; j++) {
    for (let r = 0; r < n; r++) {
      K[j * n * n + r * n + r] = 0;
      for (let c = r + 1; c < n; c++, i++) {
        K[j * n * n + r * n + c] = upper[i];
        K[j * n * n + c * n + r] = -upper[i];
      }
    }
  }
}

function addUpper(dK, n, layers, dUpper) {
  for (let j = 0, i = 0; j < layers; j++) {
    for (let r = 0; r < n; r++) {
      for (let c = r + 1; c < n; c++, i++) {
        dUpper[i] += dK[j * n * n + r * n + c] - dK[j * n * n + c * n + r];
      }
    }
  }
}

const TOGETHER = 256; // samples that run together where no states are kept: they stay in the cache

/** y_N (B, n), sample by sample, from y_0 (B, n). */
export function forward(net, Y, B) {
  const n = net.features;
  const out = new Float64Array(B * n);
  const pass = new Pass(net, Math.min(B, TOGETHER), { stored: false });
  for (let low = 0; low < B; low += TOGETHER) {
    const count = Math.min(TOGETHER, B - low);
    toFeatures(Y.subarray(low * n), n, count, pass.states);
    toSamples(pass.states, pass.forward(count), n, count, out, low * n);
  }
  return out;
}

/** All states y_0 .. y_N: (N + 1, B, n). */
export function trajectory(net, Y, B) {
  const n = net.features;
  const pass = new Pass(net, B);
  toFeatures(Y, n, B, pass.states);
  pass.forward(B);
  const out = new Float64Array((net.layers + 1) * B * n);
  for (let j = 0; j <= net.layers; j++) toSamples(pass.states, pass.at(j), n, B, out, j * B * n);
  return out;
}

/** dL/dy_0 (B, n) and dL/dweights, given G = dL/dy_N (B, n). */
export function gradients(net, Y, B, G) {
  const n = net.features;
  const pass = new Pass(net, B);
  toFeatures(Y, n, B, pass.states);
  pass.forward(B);
  toFeatures(G, n, B, pass.g);
  pass.backward();
  const y0 = new Float64Array(B * n);
  toSamples(pass.g, 0, n, B, y0);
  return { y0, weights: pass.gradients };
}
