/** Forward and backward passes through all layers, with gradients in closed form. */

import { activationOf } from "./activations.js";
import { addMultiple, addOuter, addProduct, fillRows } from "./kernels.js";
import { kindOf } from "./networks.js";

/** Room for passes of at most `most` samples; with `stored`, `backward` can follow `forward`. */
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
    const normed = this.moves.some((move) => move.normed);
    this.normed = new Float64Array(normed ? (stored ? this.count : 1) * n * most : 0);
    this.widths = new Float64Array(normed ? (stored ? this.count : 1) * most : 0);
    this.g = new Float64Array(n * most);
    this.gradients = Object.fromEntries(
      Object.entries(net.weights).map(([name, values]) => [name, new Float64Array(values.length)]),
    );
    this.B = 0;
  }

  /** Where y_j begins in `states`; without `stored`, that is the last state for any j. */
  at(j) {
    return this.stored ? j * this.moves.length * this.net.features * this.B : 0;
  }

  gainOf(move, j) {
    return move.a ? this.net.weights[move.a][j] : 1;
  }

  /** From y_0 (n, B), which must lie at the start of `states`, to y_N. */
  forward(B) {
    const { net, moves, states, s, d, stored } = this;
    const size = net.features * B;
    this.B = B;
    let from = 0;
    let at = 0;
    for (let j = 0; j < net.layers; j++) {
      for (const move of moves) {
        if (stored) {
          states.copyWithin(from + size, from, from + size);
          from += size;
        }
        const { rows, form } = move;
        const K = net.weights[move.K];
        const k = j * rows * rows;
        const v = from + move.v * B;
        const f = move.f * net.h;
        fillRows(net.weights[move.b], j * rows, rows, s, at, B);
        if (move.normed) normalise(states, from, rows, B, this.normed, at, this.widths, at / rows);
        const [u, place] = move.normed ? [this.normed, at] : [states, from + move.u * B];
        addProduct(K, k, rows, 1, rows, rows, scaleOf(move, j), u, place, s, at, B);
        this.sigma(s, s, d, at, at + rows * B);
        if (form === "adjoint") {
          addProduct(K, k, 1, rows, rows, rows, f, s, at, states, v, B);
        } else if (form === "skew") {
          const half = rows / 2;
          addProduct(K, k + half, 1, rows, half, rows, -f, s, at, states, v, B);
          addProduct(K, k, 1, rows, half, rows, f, s, at, states, v + half * B, B);
        } else {
          if (form === "replace") states.fill(0, v, v + rows * B);
          addMultiple(this.gainOf(move, j), s, at, states, v, rows * B);
        }
        if (stored) at += rows * B;
      }
    }
    return from;
  }

  /** From dL/dy_N in `g` to dL/dy_0 there, and to the gradients of all weights. */
  backward() {
    for (const values of Object.values(this.gradients)) values.fill(0);
    for (let j = this.net.layers - 1; j >= 0; j--) this.backwardLayer(j, this.g, true);
  }

  /** From dL/dy_{j+1} to dL/dy_j, in place, in any `g` (n, B). */
  backwardLayer(j, g, ofWeights) {
    const { net, moves, states, s, d, z, B } = this;
    for (let t = moves.length - 1; t >= 0; t--) {
      const move = moves[t];
      const { rows, form } = move;
      const turn = j * moves.length + t;
      const at = turn * rows * B;
      const K = net.weights[move.K];
      const k = j * rows * rows;
      const f = move.f * net.h;
      let w = g; // times which K^T sigma(K u + b) enters the loss
      let from = move.v * B;
      if (form === "skew") {
        w = this.turned;
        from = 0;
        turnedBack(g, rows, B, w);
      }
      const own = form === "adjoint" || form === "skew"; // K^T stands outside of sigma too
      if (!own) z.set(g.subarray(from, from + rows * B));
      else {
        z.fill(0, 0, rows * B);
        addProduct(K, k, rows, 1, rows, rows, f, w, from, z, 0, B);
      }
      const gain = this.gainOf(move, j);
      for (let i = 0; i < rows * B; i++) {
        if (ofWeights && move.a) this.gradients[move.a][j] += z[i] * s[at + i];
        z[i] *= gain * d[at + i];
      }
      if (ofWeights) {
        const dK = this.gradients[move.K];
        const db = this.gradients[move.b];
        const source = move.normed ? at : (turn * net.features + move.u) * B;
        addOuter(dK, k, rows, rows, scaleOf(move, j), z, 0, move.normed ? this.normed : states, source, B);
        if (own) addOuter(dK, k, rows, rows, f, s, at, w, from, B);
        for (let i = 0; i < rows * B; i++) db[j * rows + Math.floor(i / B)] += z[i];
      }
      if (form === "replace") g.fill(0, from, from + rows * B);
      if (move.normed) {
        this.turned.fill(0, 0, rows * B);
        addProduct(K, k, 1, rows, rows, rows, scaleOf(move, j), z, 0, this.turned, 0, B);
        addThroughNorm(this.turned, this.normed, at, this.widths, at / rows, rows, B, g);
      } else {
        addProduct(K, k, 1, rows, rows, rows, 1, z, 0, g, move.u * B, B);
      }
    }
  }
}

function scaleOf(move, j) {
  return move.damped ? 1 / Math.sqrt(j + 1) : 1;
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
  };
}

/** Layer norm without weights: each sample with mean 0 and variance 1, and its width before. */
function normalise(y, from, n, B, out, to, widths, at) {
  for (let i = 0; i < B; i++) {
    let mean = 0;
    let square = 0;
    for (let c = 0; c < n; c++) mean += y[from + c * B + i] / n;
    for (let c = 0; c < n; c++) square += (y[from + c * B + i] - mean) ** 2 / n;
    widths[at + i] = Math.sqrt(square + 1e-5);
    for (let c = 0; c < n; c++) out[to + c * B + i] = (y[from + c * B + i] - mean) / widths[at + i];
  }
}

/** g += the gradient w of the normalised state, taken back through `normalise`. */
function addThroughNorm(w, normed, from, widths, at, n, B, g) {
  for (let i = 0; i < B; i++) {
    let mean = 0;
    let along = 0;
    for (let c = 0; c < n; c++) {
      mean += w[c * B + i] / n;
      along += (w[c * B + i] * normed[from + c * B + i]) / n;
    }
    for (let c = 0; c < n; c++) {
      const x = normed[from + c * B + i];
      g[c * B + i] += (w[c * B + i] - mean - x * along) / widths[at + i];
    }
  }
}

/** J^T g = (g_q, -g_p) */
function turnedBack(g, n, B, out) {
  const half = (n / 2) * B;
  for (let i = 0; i < half; i++) {
    out[i] = g[half + i];
    out[half + i] = -g[i];
  }
}
