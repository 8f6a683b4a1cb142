/** Adam, and gradient descent with Nesterov's momentum, with the constants of PyTorch. */

const MAKERS = { adam: Adam, sgd: Sgd };

/** An object that moves these arrays along gradients of the same lengths: `descend(gradients, rate)`. */
export function createOptimiser(name, arrays) {
  if (!Object.hasOwn(MAKERS, name)) throw new Error(`The optimiser ${name} is not known.`);
  return MAKERS[name](arrays);
}

function Adam(arrays) {
  const [first, second] = [0, 1].map(() => arrays.map((w) => new Float64Array(w.length)));
  let count = 0;
  return {
    descend(gradients, rate) {
      count += 1;
      const size = rate / (1 - 0.9 ** count);
      const root = 1 / Math.sqrt(1 - 0.999 ** count);
      arrays.forEach((w, k) => {
        const [g, m, v] = [gradients[k], first[k], second[k]];
        for (let i = 0; i < w.length; i++) {
          m[i] += 0.1 * (g[i] - m[i]);
          v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
          w[i] -= (size * m[i]) / (Math.sqrt(v[i]) * root + 1e-8);
        }
      });
    },
  };
}

function Sgd(arrays) {
  const speeds = arrays.map((w) => new Float64Array(w.length));
  return {
    descend(gradients, rate) {
      arrays.forEach((w, k) => {
        const [g, speed] = [gradients[k], speeds[k]];
        for (let i = 0; i < w.length; i++) {
          speed[i] = 0.9 * speed[i] + g[i];
          w[i] -= rate * (g[i] + 0.9 * speed[i]);
        }
      });
    },
  };
}
