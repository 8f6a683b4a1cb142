/** Loops over states that lie feature by feature: entry c of sample i is at c * B + i. */

/** out += factor M u, where M (rows, cols) has its entry [r, c] at k + r * stride + c * step. */
export function addProduct(M, k, stride, step, rows, cols, factor, u, from, out, to, B) {
  for (let r = 0; r < rows; r++) {
    const row = to + r * B;
    let c = 0;
    if (cols % 2) {
      const w = factor * M[k + r * stride];
      for (let i = 0; i < B; i++) out[row + i] += w * u[from + i];
      c = 1;
    }
    for (; c < cols; c += 2) {
      const w = factor * M[k + r * stride + c * step];
      const v = factor * M[k + r * stride + (c + 1) * step];
      const here = from + c * B;
      const next = here + B;
      for (let i = 0; i < B; i++) out[row + i] += w * u[here + i] + v * u[next + i];
    }
  }
}

/** Each row of z (rows, B) becomes its entry of b. */
export function fillRows(b, o, rows, z, to, B) {
  for (let r = 0; r < rows; r++) z.fill(b[o + r], to + r * B, to + (r + 1) * B);
}

/** out += factor s for so many numbers */
export function addMultiple(factor, s, from, out, to, count) {
  for (let i = 0; i < count; i++) out[to + i] += factor * s[from + i];
}

/** dK[r, c] += the sum over samples of factor a_r b_c */
export function addOuter(dK, k, rows, cols, factor, a, from, b, at, B) {
  for (let r = 0; r < rows; r++) {
    const row = from + r * B;
    for (let c = 0; c < cols; c++) {
      const column = at + c * B;
      let even = 0;
      let odd = 0;
      let i = 0;
      for (; i + 1 < B; i += 2) {
        even += a[row + i] * b[column + i];
        odd += a[row + i + 1] * b[column + i + 1];
      }
      if (i < B) even += a[row + i] * b[column + i];
      dK[k + r * cols + c] += factor * (even + odd);
    }
  }
}

/** (B, n), sample by sample, into features (n, B). */
export function toFeatures(Y, n, B, out, to = 0) {
  for (let i = 0; i < B; i++) for (let c = 0; c < n; c++) out[to + c * B + i] = Y[i * n + c];
}
