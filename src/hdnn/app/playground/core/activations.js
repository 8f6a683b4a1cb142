/**
 * Activations by name: sigma and its slope, entry by entry, with the values of hdnn.activations.
 *
 * Each fills s with sigma(z) and d with sigma'(z), from one index up to another; s may be z itself.
 * Every loop is written out: a function called for each number would cost more than its arithmetic.
 */

const ACTIVATION = { tanh, relu, sigmoid, softplus, silu, sin };

/** Those that never decrease: for them the gradients of forward Euler do not vanish either. */
export const MONOTONE = ["tanh", "relu", "sigmoid", "softplus"];

export function activationOf(name) {
  if (!Object.hasOwn(ACTIVATION, name)) {
    throw new Error(`The activation ${name} is not one of ${Object.keys(ACTIVATION).join(", ")}.`);
  }
  return ACTIVATION[name];
}

function tanh(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const value = 1 - 2 / (Math.exp(2 * z[i]) + 1); // three times as fast as Math.tanh
    s[i] = value;
    d[i] = 1 - value * value;
  }
}

function relu(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const x = z[i];
    s[i] = x <= 0 ? 0 : x; // NaN stays NaN
    d[i] = x > 0 ? 1 : 0;
  }
}

function sigmoid(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const value = 1 / (1 + Math.exp(-z[i]));
    s[i] = value;
    d[i] = value * (1 - value);
  }
}

function softplus(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const x = z[i];
    s[i] = x > 0 ? x + Math.log1p(Math.exp(-x)) : Math.log1p(Math.exp(x));
    d[i] = 1 / (1 + Math.exp(-x));
  }
}

function silu(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const x = z[i];
    const value = 1 / (1 + Math.exp(-x));
    s[i] = x * value;
    d[i] = value * (1 + x * (1 - value));
  }
}

function sin(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const x = z[i];
    s[i] = Math.sin(x);
    d[i] = Math.cos(x);
  }
}
