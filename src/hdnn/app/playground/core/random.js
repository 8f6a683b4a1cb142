/** Random numbers that a seed decides: the same on every machine, though not those of PyTorch. */

/** A generator (xoshiro128**, Blackman and Vigna 2018) for any whole number as its seed. */
export function createRandom(seed = 0) {
  const s = new Uint32Array(4);
  let low = seed >>> 0;
  let high = Math.floor(seed / 2 ** 32) >>> 0;
  for (let k = 0; k < 4; k++) {
    // Seeds that differ in one bit must not start alike: mix them first.
    low = (low + 0x9e3779b9) >>> 0;
    high = (high + 0x85ebca6b) >>> 0;
    s[k] = mixed(low ^ mixed(high));
  }
  let spare = NaN;

  function bits() {
    const result = Math.imul(rotated(Math.imul(s[1], 5), 7), 9) >>> 0;
    const t = s[1] << 9;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotated(s[3], 11);
    return result;
  }

  /** From [0, 1), with 53 random bits. */
  function uniform() {
    const high = bits() >>> 5;
    return (high * 2 ** 26 + (bits() >>> 6)) / 2 ** 53;
  }

  /** From N(0, 1), two at a time (Box and Muller). */
  function normal() {
    if (!Number.isNaN(spare)) {
      const kept = spare;
      spare = NaN;
      return kept;
    }
    const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
    const angle = 2 * Math.PI * uniform();
    spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  }

  /** Put the entries of an array into a random order, in place. */
  function shuffle(order) {
    for (let i = order.length - 1; i > 0; i--) {
      const j = Math.floor(uniform() * (i + 1));
      const kept = order[i];
      order[i] = order[j];
      order[j] = kept;
    }
    return order;
  }

  return { uniform, normal, shuffle };
}

function rotated(x, k) {
  return (x << k) | (x >>> (32 - k));
}

function mixed(x) {
  x = Math.imul(x ^ (x >>> 16), 0x21f0aaad);
  x = Math.imul(x ^ (x >>> 15), 0x735a2d97);
  return (x ^ (x >>> 15)) >>> 0;
}
