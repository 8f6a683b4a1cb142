/** The spectral norm of small matrices, exact up to rounding. */

import { MOST_FEATURES } from "./networks.js";

const SCALED = new Float64Array(MOST_FEATURES * MOST_FEATURES);
const GRAM = new Float64Array(MOST_FEATURES * MOST_FEATURES);
const DIAGONAL = new Float64Array(MOST_FEATURES);
const BESIDE = new Float64Array(MOST_FEATURES); // the entries next to the diagonal
const MIRROR = new Float64Array(MOST_FEATURES);
const MIRRORED = new Float64Array(MOST_FEATURES);

/** The largest singular value of A (n, n), given row by row. */
export function spectralNorm(A, n) {
  let size = 0;
  for (let i = 0; i < n * n; i++) {
    const a = Math.abs(A[i]);
    if (!(a <= size)) size = a; // NaN too
  }
  if (!(size > 0 && size < Infinity)) return size;
  // Scaled, so that squares neither overflow nor vanish: perceptrons come to norms of 1e-200.
  for (let i = 0; i < n * n; i++) SCALED[i] = A[i] / size;
  for (let r = 0; r < n; r++) {
    for (let c = 0; c <= r; c++) {
      let sum = 0;
      for (let i = 0; i < n; i++) sum += SCALED[r * n + i] * SCALED[c * n + i];
      GRAM[r * n + c] = sum;
      GRAM[c * n + r] = sum;
    }
  }
  tridiagonalise(GRAM, n);
  findEigenvalues(DIAGONAL, BESIDE, n);
  let most = DIAGONAL[0];
  for (let c = 1; c < n; c++) most = Math.max(most, DIAGONAL[c]);
  return size * Math.sqrt(most);
}

/** Mirror a symmetric G, in place, until it is tridiagonal (Householder). */
function tridiagonalise(G, n) {
  const v = MIRROR;
  const w = MIRRORED;
  for (let k = 0; k < n - 2; k++) {
    const first = G[(k + 1) * n + k];
    let rest = 0;
    for (let i = k + 2; i < n; i++) rest += G[i * n + k] * G[i * n + k];
    if (rest === 0) continue;
    const norm = Math.sqrt(first * first + rest);
    const turned = first > 0 ? -norm : norm;
    const factor = 1 / (norm * (norm + Math.abs(first))); // 2 / |v|^2
    v[k + 1] = first - turned;
    for (let i = k + 2; i < n; i++) v[i] = G[i * n + k];
    let along = 0;
    for (let i = k + 1; i < n; i++) {
      let sum = 0;
      for (let c = k + 1; c < n; c++) sum += G[i * n + c] * v[c];
      w[i] = factor * sum;
      along += w[i] * v[i];
    }
    for (let i = k + 1; i < n; i++) w[i] -= 0.5 * factor * along * v[i];
    for (let i = k + 1; i < n; i++) {
      for (let c = k + 1; c < n; c++) G[i * n + c] -= v[i] * w[c] + w[i] * v[c];
    }
    G[(k + 1) * n + k] = turned;
  }
  for (let i = 0; i < n; i++) {
    DIAGONAL[i] = G[i * n + i];
    BESIDE[i] = i < n - 1 ? G[(i + 1) * n + i] : 0;
  }
}

/** The eigenvalues of a tridiagonal matrix in the place of its diagonal d (implicit QL). */
function findEigenvalues(d, e, n) {
  for (let l = 0; l < n; l++) {
    for (let turn = 0; turn < 60; turn++) {
      let m = l;
      for (; m < n - 1; m++) {
        if (Math.abs(e[m]) <= 1e-16 * (Math.abs(d[m]) + Math.abs(d[m + 1]))) break;
      }
      if (m === l) break;
      const gap = (d[l + 1] - d[l]) / (2 * e[l]);
      const root = Math.sqrt(gap * gap + 1);
      let g = d[m] - d[l] + e[l] / (gap < 0 ? gap - root : gap + root);
      let sin = 1;
      let cos = 1;
      let shift = 0;
      let i = m - 1;
      for (; i >= l; i--) {
        const f = sin * e[i];
        const b = cos * e[i];
        const r = Math.sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r === 0) break;
        sin = f / r;
        cos = g / r;
        g = d[i + 1] - shift;
        const turned = (d[i] - g) * sin + 2 * cos * b;
        shift = sin * turned;
        d[i + 1] = g + shift;
        g = cos * turned - b;
      }
      if (i >= l) {
        d[i + 1] -= shift;
      } else {
        d[l] -= shift;
        e[l] = g;
      }
      e[m] = 0;
    }
  }
}
