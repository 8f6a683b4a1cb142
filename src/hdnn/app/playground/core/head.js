/** The output layer sigmoid(w y + b), by damped Newton steps on the ridge problem: a convex one. */

export function createHead(features) {
  return { weight: new Float64Array(features), bias: new Float64Array(1) };
}

/** Room to solve for the output layer of at most `most` samples. */
export class HeadSolver {
  constructor(head, most) {
    const d = head.weight.length + 1;
    this.head = head;
    this.d = d;
    this.W = new Float64Array(d);
    this.step = new Float64Array(d);
    this.gradient = new Float64Array(d); // of the mean loss in (w, b)
    this.H = new Float64Array(d * d);
    this.S = new Float64Array(most); // scores
    this.move = new Float64Array(most); // by which a step changes them
    this.residual = new Float64Array(most); // the gradient of the mean loss in the scores
  }

  /** At most so many Newton steps for features y (n, B), which begin at `from`. */
  newton(y, from, t, B, ridge, steps) {
    const { W, S, step, gradient, move, d } = this;
    W.fill(0);
    S.fill(0, 0, B);
    let value = Math.LN2;
    for (let k = 0; k < steps; k++) {
      this._derivatives(y, from, t, B, ridge);
      if (!solved(this.H, gradient, step, d)) break;
      let decrease = 0;
      for (let c = 0; c < d; c++) decrease += gradient[c] * step[c];
      if (!(decrease > 1e-14)) break;
      scores(step, y, from, B, move);
      // Far from the optimum a full step can overshoot: halve it until the loss falls.
      let size = 1;
      let trial = Infinity;
      for (let halvings = 0; halvings < 30; halvings++, size /= 2) {
        trial = meanLoss(S, move, size, t, B);
        for (let c = 0; c < d; c++) trial += 0.5 * ridge * (W[c] - size * step[c]) ** 2;
        if (trial <= value - 1e-4 * size * decrease) break;
        trial = Infinity;
      }
      if (trial === Infinity) break;
      value = trial;
      for (let c = 0; c < d; c++) W[c] -= size * step[c];
      for (let i = 0; i < B; i++) S[i] -= size * move[i];
    }
    this.head.weight.set(W.subarray(0, d - 1));
    this.head.bias[0] = W[d - 1];
  }

  /** The mean loss with the output layer as it is; sets `residual` and `correct`. */
  measure(y, from, t, B) {
    const { S, W, d, residual, head } = this;
    W.set(head.weight);
    W[d - 1] = head.bias[0];
    scores(W, y, from, B, S);
    let right = 0;
    for (let i = 0; i < B; i++) {
      residual[i] = (1 / (1 + Math.exp(-S[i])) - t[i]) / B;
      if (S[i] > 0 === t[i] > 0) right += 1;
    }
    this.correct = right / B;
    return meanLoss(S, S, 0, t, B);
  }

  /** dL/dy_N (n, B) after `measure`. */
  pullBack(g, B) {
    const { residual, head } = this;
    for (let c = 0; c < this.d - 1; c++) {
      const w = head.weight[c];
      for (let i = 0; i < B; i++) g[c * B + i] = w * residual[i];
    }
  }

  /** dL/d(w, b) after `measure`, into `gradient`. */
  ownGradient(y, from, B) {
    const { residual, gradient, d } = this;
    for (let c = 0; c < d; c++) {
      const row = from + c * B;
      gradient[c] = 0;
      for (let i = 0; i < B; i++) gradient[c] += residual[i] * (c < d - 1 ? y[row + i] : 1);
    }
  }

  _derivatives(y, from, t, B, ridge) {
    const { S, W, H, gradient, residual, move, d } = this;
    for (let i = 0; i < B; i++) {
      const P = 1 / (1 + Math.exp(-S[i]));
      residual[i] = (P - t[i]) / B;
      move[i] = (P * (1 - P)) / B; // the curvature of each; `move` is free until the step is known
    }
    this.ownGradient(y, from, B);
    for (let r = 0; r < d; r++) {
      gradient[r] += ridge * W[r];
      for (let c = 0; c <= r; c++) {
        let sum = r === c ? ridge : 0;
        const [a, b] = [from + r * B, from + c * B];
        for (let i = 0; i < B; i++) {
          sum += move[i] * (r < d - 1 ? y[a + i] : 1) * (c < d - 1 ? y[b + i] : 1);
        }
        H[r * d + c] = sum;
      }
    }
  }
}

/** out = w y + b for all samples, with (w, b) in one array */
function scores(W, y, from, B, out) {
  const n = W.length - 1;
  out.fill(W[n], 0, B);
  for (let c = 0; c < n; c++) {
    const w = W[c];
    const row = from + c * B;
    for (let i = 0; i < B; i++) out[i] += w * y[row + i];
  }
}

/** The mean cross-entropy of the scores S - size move. */
function meanLoss(S, move, size, t, B) {
  let sum = 0;
  for (let i = 0; i < B; i++) {
    const score = S[i] - size * move[i];
    const wrong = t[i] ? -score : score;
    sum += Math.max(wrong, 0) + Math.log1p(Math.exp(-Math.abs(wrong)));
  }
  return sum / B;
}

/** x with H x = g, by Cholesky's factors in the place of H; false if it is not positive. */
function solved(H, g, x, d) {
  for (let r = 0; r < d; r++) {
    for (let c = 0; c <= r; c++) {
      let sum = H[r * d + c];
      for (let k = 0; k < c; k++) sum -= H[r * d + k] * H[c * d + k];
      if (r > c) H[r * d + c] = sum / H[c * d + c];
      else if (sum > 0) H[r * d + r] = Math.sqrt(sum);
      else return false;
    }
  }
  for (let r = 0; r < d; r++) {
    let sum = g[r];
    for (let k = 0; k < r; k++) sum -= H[r * d + k] * x[k];
    x[r] = sum / H[r * d + r];
  }
  for (let r = d - 1; r >= 0; r--) {
    let sum = x[r];
    for (let k = r + 1; k < d; k++) sum -= H[k * d + r] * x[k];
    x[r] = sum / H[r * d + r];
  }
  return true;
}
