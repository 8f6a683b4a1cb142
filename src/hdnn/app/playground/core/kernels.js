/**
 * The loops that everything else is made of.
 *
 * States lie feature by feature: entry c of sample i is at c * B + i. So a weight is read once and
 * used for all samples, in a loop without any other decision. K is (rows, cols), row by row, or
 * its transpose where `stride` and `step` say so: K[r, c] is at k + r * stride + c * step.
 */

/** z = K u + b */
export function affine(K, k, stride, step, b, o, rows, cols, u, from, z, to, B) {
  for (let r = 0; r < rows; r++) {
    const row = to + r * B;
    const first = b[o + r];
    let c = 0;
    if (cols % 2) {
      const w = K[k + r * stride];
      for (let i = 0; i < B; i++) z[row + i] = first + w * u[from + i];
      c = 1;
    } else {
      const w = K[k + r * stride];
      const v = K[k + r * stride + step];
      const next = from + B;
      for (let i = 0; i < B; i++) z[row + i] = first + w * u[from + i] + v * u[next + i];
      c = 2;
    }
    for (; c < cols; c += 2) {
      const w = K[k + r * stride + c * step];
      const v = K[k + r * stride + (c + 1) * step];
      const here = from + c * B;
      const next = here + B;
      for (let i = 0; i < B; i++) z[row + i] += w * u[here + i] + v * u[next + i];
    }
  }
}

/** out += factor K^T s */
export function addAdjoint(K, k, stride, step, rows, cols, factor, s, from, out, to, B) {
  for (let c = 0; c < cols; c++) {
    const column = to + c * B;
    let r = 0;
    if (rows % 2) {
      const w = factor * K[k + c * step];
      for (let i = 0; i < B; i++) out[column + i] += w * s[from + i];
      r = 1;
    }
    for (; r < rows; r += 2) {
      const w = factor * K[k + r * stride + c * step];
      const v = factor * K[k + (r + 1) * stride + c * step];
      const here = from + r * B;
      const next = here + B;
      for (let i = 0; i < B; i++) out[column + i] += w * s[here + i] + v * s[next + i];
    }
  }
}

/** z = factor K w times d, entry by entry: how the loss depends on K u + b, if s adds to w. */
export function pulledBack(K, k, stride, step, rows, cols, factor, w, from, d, at, z, B) {
  for (let r = 0; r < rows; r++) {
    const row = r * B;
    const slope = at + r * B;
    let c = 0;
    if (cols % 2) {
      const v = factor * K[k + r * stride];
      for (let i = 0; i < B; i++) z[row + i] = v * w[from + i];
      c = 1;
    } else {
      const v = factor * K[k + r * stride];
      const x = factor * K[k + r * stride + step];
      const next = from + B;
      for (let i = 0; i < B; i++) z[row + i] = v * w[from + i] + x * w[next + i];
      c = 2;
    }
    for (; c < cols; c += 2) {
      const v = factor * K[k + r * stride + c * step];
      const x = factor * K[k + r * stride + (c + 1) * step];
      const here = from + c * B;
      const next = here + B;
      for (let i = 0; i < B; i++) z[row + i] += v * w[here + i] + x * w[next + i];
    }
    for (let i = 0; i < B; i++) z[row + i] *= d[slope + i];
  }
}

/** out += factor s for so many numbers */
export function addMultiple(factor, s, from, out, to, count) {
  for (let i = 0; i < count; i++) out[to + i] += factor * s[from + i];
}

/** z = factor w times d, entry by entry */
export function scaledProduct(factor, w, from, d, at, z, count) {
  for (let i = 0; i < count; i++) z[i] = factor * w[from + i] * d[at + i];
}

/** dK[r, c] += the sum over samples of factor a_r b_c */
export function addOuter(dK, k, stride, step, rows, cols, factor, a, from, b, at, B) {
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
      dK[k + r * stride + c * step] += factor * (even + odd);
    }
  }
}

/** db[r] += the sum over samples of z_r */
export function addSums(db, o, rows, z, B) {
  for (let r = 0; r < rows; r++) {
    let sum = 0;
    for (let i = 0; i < B; i++) sum += z[r * B + i];
    db[o + r] += sum;
  }
}

/** (B, n), sample by sample, into features (n, B). */
export function toFeatures(Y, n, B, out, to = 0) {
  for (let i = 0; i < B; i++) for (let c = 0; c < n; c++) out[to + c * B + i] = Y[i * n + c];
}

/** And back. */
export function toSamples(y, from, n, B, out, to = 0) {
  for (let i = 0; i < B; i++) for (let c = 0; c < n; c++) out[to + i * n + c] = y[from + c * B + i];
}
