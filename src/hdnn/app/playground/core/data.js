/** Two classes in the plane: the sets of hdnn.data.planar, unions of arcs that are shuffled. */

import { createRandom } from "./random.js";

const TURN = 4 * Math.PI; // twice around
const spiral = (r) => (s) => [(r + s) * Math.cos(TURN * s), (r + s) * Math.sin(TURN * s)];
const upper = (shift) => (s) => [shift + Math.cos(Math.PI * s), Math.sin(Math.PI * s)];
const lower = (shift) => (s) => [shift + 1 - Math.cos(Math.PI * s), 0.5 - Math.sin(Math.PI * s)];
const ring = (r) => (s) => [r * Math.cos(TURN * s), r * Math.sin(TURN * s)];

/** Each arc with its class, the uniform noise on each coordinate, and [x0, x1, y0, y1]. */
const SETS = {
  swiss_roll: {
    arcs: [[spiral(0), 1], [spiral(0.2), 0]],
    noise: 0,
    domain: [-1.2, 1.2, -1.2, 1.2],
  },
  double_moons: {
    arcs: [[upper(0), 0], [lower(0), 1], [upper(2), 0], [lower(2), 1]],
    noise: 0.15,
    domain: [-2, 5, -1, 2],
  },
  double_circles: {
    arcs: [[ring(1), 0], [ring(2), 1], [ring(3), 0], [ring(4), 1]],
    noise: 0.3,
    domain: [-5, 5, -5, 5],
  },
};

export const datasets = Object.fromEntries(
  Object.keys(SETS).map((name) => [name, (points, options) => planar(name, points, options)]),
);

/** Run through each arc at s = i/k, i = 0 .. k-1, add uniform noise, shuffle. */
function planar(name, points = 8000, { noise, seed = 0 } = {}) {
  const { arcs, noise: usual, domain } = SETS[name];
  const width = noise ?? usual;
  const random = createRandom(seed);
  const x = new Float64Array(2 * points);
  const t = new Uint8Array(points);
  const order = random.shuffle(Uint32Array.from({ length: points }, (_, i) => i));
  let at = 0;
  arcs.forEach(([arc, label], index) => {
    const k = Math.floor(points / arcs.length) + (index < points % arcs.length ? 1 : 0);
    for (let i = 0; i < k; i++, at++) {
      const place = order[at];
      const [a, b] = arc(i / k);
      x[2 * place] = a + width * (2 * random.uniform() - 1);
      x[2 * place + 1] = b + width * (2 * random.uniform() - 1);
      t[place] = label;
    }
  });
  return { x, t, domain: [...domain] };
}
