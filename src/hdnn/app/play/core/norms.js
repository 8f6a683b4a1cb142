/**
 * Spectral norms of dy_N/dy_j: how much of a gradient arrives at layer j.
 *
 * Column c of dy_N/dy_j is the gradient of the c-th entry of y_N, so n gradients that start from
 * the unit vectors are all that is needed.
 */

import { toFeatures } from "./kernels.js";
import { Pass } from "./passes.js";

/** Smallest, (lower) median and largest norm over B samples y_0 (B, n), for j = 0 .. N-1. */
export function norms(net, Y, B) {
  const all = everyNorm(net, Y, B);
  const found = {};
  for (const name of ["min", "median", "max"]) found[name] = new Float64Array(net.layers);
  const row = new Float64Array(B);
  for (let j = 0; j < net.layers; j++) {
    let count = 0;
    for (let i = 0; i < B; i++) {
      const norm = all[j * B + i];
      if (!Number.isNaN(norm)) row[count++] = norm; // samples that are lost are left out
    }
    const sorted = row.subarray(0, count).sort();
    found.min[j] = count ? sorted[0] : NaN;
    found.median[j] = count ? sorted[(count - 1) >> 1] : NaN;
    found.max[j] = count ? sorted[count - 1] : NaN;
  }
  return found;
}

/** The norms for a single sample y_0, j = 0 .. N-1. */
export function normsOf(net, y) {
  return everyNorm(net, y, 1);
}

/** All norms: (N, B). */
export function everyNorm(net, Y, B) {
  const n = net.features;
  const pass = new Pass(net, B);
  toFeatures(Y, n, B, pass.states);
  pass.forward(B);
  const columns = Array.from({ length: n }, (_, c) => {
    const g = new Float64Array(n * B);
    g.fill(1, c * B, (c + 1) * B);
    return g;
  });
  const out = new Float64Array(net.layers * B);
  const A = new Float64Array(n * n);
  const work = new Float64Array(n * n);
  for (let j = net.layers - 1; j >= 0; j--) {
    for (let c = 0; c < n; c++) pass.backwardLayer(j, columns[c], false);
    for (let i = 0; i < B; i++) {
      for (let c = 0; c < n; c++) {
        const g = columns[c];
        for (let a = 0; a < n; a++) A[c * n + a] = g[a * B + i];
      }
      out[j * B + i] = spectralNorm(A, n, work);
    }
  }
  return out;
}

/** The largest singular value of A (n, n), given row by row; `work` is room for n^2 numbers. */
export function spectralNorm(A, n, work = new Float64Array(n * n)) {
  let size = 0;
  for (let i = 0; i < n * n; i++) {
    const a = Math.abs(A[i]);
    if (!(a <= size)) size = a; // NaN too
  }
  if (!(size > 0 && size < Infinity)) return size;
  // Scaled, so that squares neither overflow nor vanish: perceptrons come to norms of 1e-200.
  const scale = 1 / size;
  const G = work;
  for (let r = 0; r < n; r++) {
    for (let c = 0; c <= r; c++) {
      let sum = 0;
      for (let i = 0; i < n; i++) sum += scale * A[r * n + i] * (scale * A[c * n + i]);
      G[r * n + c] = sum;
      G[c * n + r] = sum;
    }
  }
  return size * Math.sqrt(largestEigenvalue(G, n));
}

/** Of a symmetric matrix, which is overwritten: Jacobi's rotations until nothing is left. */
function largestEigenvalue(G, n) {
  let trace = 0;
  for (let c = 0; c < n; c++) trace += G[c * n + c];
  for (let sweep = 0; sweep < 30; sweep++) {
    let rotated = false;
    for (let p = 0; p < n - 1; p++) {
      for (let q = p + 1; q < n; q++) {
        const off = G[p * n + q];
        const a = G[p * n + p];
        const b = G[q * n + q];
        // So little changes the largest eigenvalue by no more than rounding.
        if (off * off <= 1e-17 * trace * (Math.abs(a - b) + 1e-16 * trace)) continue;
        rotated = true;
        const theta = (b - a) / (2 * off);
        const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1));
        const cos = 1 / Math.sqrt(t * t + 1);
        const sin = t * cos;
        G[p * n + p] = a - t * off;
        G[q * n + q] = b + t * off;
        G[p * n + q] = 0;
        G[q * n + p] = 0;
        for (let k = 0; k < n; k++) {
          if (k === p || k === q) continue;
          const x = G[k * n + p];
          const y = G[k * n + q];
          G[k * n + p] = G[p * n + k] = cos * x - sin * y;
          G[k * n + q] = G[q * n + k] = sin * x + cos * y;
        }
      }
    }
    if (!rotated) break;
  }
  let most = G[0];
  for (let c = 1; c < n; c++) most = Math.max(most, G[c * n + c]);
  return most;
}
