/** Spectral norms of dy_N/dy_j, whose columns are the gradients of the entries of y_N. */

import { toFeatures } from "./kernels.js";
import { Pass } from "./passes.js";
import { spectralNorm } from "./spectral.js";

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
  for (let j = net.layers - 1; j >= 0; j--) {
    for (let c = 0; c < n; c++) pass.backwardLayer(j, columns[c], false);
    for (let i = 0; i < B; i++) {
      for (let c = 0; c < n; c++) {
        const g = columns[c];
        for (let a = 0; a < n; a++) A[c * n + a] = g[a * B + i];
      }
      out[j * B + i] = spectralNorm(A, n);
    }
  }
  return out;
}
