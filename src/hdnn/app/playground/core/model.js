/** A model {augment, net, head}: x among zeros, then y_N, then a probability. */

import { addMultiple } from "./kernels.js";
import { Pass } from "./passes.js";

export const INPUTS = 2;
export const AT_ONCE = 256; // samples that run together where no states are kept

/** "split": x1 into the first entry of p, x2 into the last of q, as hdnn.Augment by default. */
export function createAugment(features, placement = "split") {
  const given = Array.isArray(placement);
  const positions = given ? placement : placement === "split" ? [0, features - 1] : [0, 1];
  const fine = positions.length === INPUTS && positions[0] !== positions[1] &&
    positions.every((i) => Number.isInteger(i) && i >= 0 && i < features);
  if (!fine) {
    throw new Error(`Two inputs do not fit into ${features} features at the places ` +
      `${positions.join(" and ")}; take at least ${INPUTS} features.`);
  }
  return { inputs: INPUTS, features, placement, positions };
}

/** y_0 (n, B) of the points `low` to `low + B`, or of those that `order` names there. */
export function embed({ features, positions }, x, low, B, out, order = null) {
  out.fill(0, 0, features * B);
  for (let k = 0; k < INPUTS; k++) {
    const row = positions[k] * B;
    for (let i = 0; i < B; i++) {
      out[row + i] = x[INPUTS * (order ? order[low + i] : low + i) + k];
    }
  }
}

/** Room for `scoresOf` and `featuresOf` of a model. */
export function createRoom(model) {
  return new Pass(model.net, AT_ONCE, { stored: false });
}

/** w y_N + b of each point. */
export function scoresOf(model, x, pass = createRoom(model)) {
  const { head } = model;
  const count = x.length / INPUTS;
  const y = new Float64Array(model.augment.features * count);
  featuresOf(model, x, pass, y);
  const out = new Float64Array(count).fill(head.bias[0]);
  head.weight.forEach((w, c) => addMultiple(w, y, c * count, out, 0, count));
  return out;
}

/** y_N of all points, (n, count). */
export function featuresOf(model, x, pass, out) {
  const n = model.augment.features;
  const count = x.length / INPUTS;
  for (let low = 0; low < count; low += AT_ONCE) {
    const B = Math.min(AT_ONCE, count - low);
    embed(model.augment, x, low, B, pass.states);
    const from = pass.forward(B);
    for (let c = 0; c < n; c++) {
      const row = from + c * B;
      out.set(pass.states.subarray(row, row + B), c * count + low);
    }
  }
}

/** The probability of class 1 for each point. */
export function predict(model, x, pass = createRoom(model)) {
  return scoresOf(model, x, pass).map((score) => 1 / (1 + Math.exp(-score)));
}

/** The mean cross-entropy and the fraction of points that are right. */
export function evaluate(model, x, t, pass = createRoom(model)) {
  const scores = scoresOf(model, x, pass);
  let loss = 0;
  let right = 0;
  for (let i = 0; i < scores.length; i++) {
    const wrong = t[i] ? -scores[i] : scores[i];
    loss += Math.max(wrong, 0) + Math.log1p(Math.exp(-Math.abs(wrong)));
    if (scores[i] > 0 === t[i] > 0) right += 1;
  }
  return { loss: loss / scores.length, accuracy: right / scores.length };
}
