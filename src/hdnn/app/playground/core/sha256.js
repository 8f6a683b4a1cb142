/** SHA-256 (FIPS 180-4). Browsers have one too, but not for pages that are opened as files. */

const PRIMES = [];
for (let number = 2; PRIMES.length < 64; number++) {
  if (PRIMES.every((prime) => number % prime)) PRIMES.push(number);
}
const fraction = (x) => Math.floor((x - Math.floor(x)) * 2 ** 32);
const START = Uint32Array.from(PRIMES.slice(0, 8), (prime) => fraction(Math.sqrt(prime)));
const ROUNDS = Uint32Array.from(PRIMES, (prime) => fraction(Math.cbrt(prime)));

/** The checksum of some bytes, as 64 hexadecimal digits. */
export function sha256(bytes) {
  const blocks = Math.ceil((bytes.length + 9) / 64);
  const padded = new Uint8Array(64 * blocks);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
  const state = START.slice();
  const w = new Uint32Array(64);
  for (let block = 0; block < blocks; block++) {
    for (let i = 0; i < 16; i++) w[i] = view.getUint32(64 * block + 4 * i);
    for (let i = 16; i < 64; i++) {
      const a = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ (w[i - 15] >>> 3);
      const b = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ (w[i - 2] >>> 10);
      w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    compress(state, w);
  }
  return Array.from(state, (word) => word.toString(16).padStart(8, "0")).join("");
}

function compress(state, w) {
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 64; i++) {
    const high = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25);
    const one = (h + high + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
    const low = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
    const two = (low + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => {
    state[i] += word;
  });
}

function turned(x, k) {
  return (x >>> k) | (x << (32 - k));
}
