/**
 * Activations by name: sigma and its slope, entry by entry, with the values of hdnn.activations.
 *
 * Each fills s with sigma(z) and d with sigma'(z), from one index up to another; s may be z itself.
 * Every loop is written out: a function called for each number would cost more than its arithmetic.
 */

const ACTIVATION = { tanh, relu, sigmoid, softplus, gelu, silu, sin };

export const ACTIVATIONS = Object.keys(ACTIVATION);

/** Those that never decrease: for them the gradients of forward Euler do not vanish either. */
export const MONOTONE = ["tanh", "relu", "sigmoid", "softplus"];

export function activationOf(name) {
  if (!Object.hasOwn(ACTIVATION, name)) {
    const known = ACTIVATIONS.join(", ");
    throw new Error(`The activation ${name} is not known; choose one of ${known}.`);
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

function gelu(z, s, d, from, to) {
  for (let i = from; i < to; i++) {
    const x = z[i];
    const Phi = 0.5 * erfc(-x * Math.SQRT1_2);
    s[i] = x * Phi;
    d[i] = Phi + (x * Math.exp(-0.5 * x * x)) / Math.sqrt(2 * Math.PI);
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

// log(erfc(x) / t) + x^2 in Chebyshev polynomials of 2t - 1 with t = 2 / (2 + x), for x >= 0.
const ERFC = Float64Array.of(
  -1.3026537197817094, 0.64196979235649026, 0.019476473204185836, -0.0095615147868086316,
  -0.00094659534448203687, 0.00036683949785276145, 4.2523324806907772e-5, -2.0278578112534243e-5,
  -1.6242900046470255e-6, 1.3036558355805232e-6, 1.5626441722066143e-8, -8.5238095914926543e-8,
  6.5290544390988515e-9, 5.0593434955514689e-9, -9.9136415649303309e-10, -2.2736512229318359e-10,
  9.646791102015527e-11, 2.3940380830391147e-12, -6.8860275264975534e-12, 8.9448792730907257e-13,
  3.1309213993429581e-13, -1.1270822361367252e-13, 3.8109052551892321e-16, 7.106097613609237e-15,
  -1.5230282014571043e-15, -9.457494571291234e-17, 1.210237189224279e-16, -2.816663087747177e-17,
);

/** 1 - erf(x), to the last digits of float64. */
export function erfc(x) {
  const a = Math.abs(x);
  const t = 2 / (2 + a);
  const y = 4 * t - 2;
  let here = 0;
  let before = 0;
  for (let k = ERFC.length - 1; k > 0; k--) {
    const next = y * here - before + ERFC[k];
    before = here;
    here = next;
  }
  const value = t * Math.exp(-a * a + 0.5 * (y * here + ERFC[0]) - before);
  return x >= 0 ? value : 2 - value;
}
