// Prints the smallest norm of dy_N/dy_j over random networks of each kind: see test_core.py.
import { pathToFileURL } from "node:url";

const { ACTIVATIONS, NETWORKS, createNetwork, guarantee, norms } = await import(
  pathToFileURL(process.argv[2]).href
);

const smallest = {};
for (const { id } of NETWORKS) {
  for (const activation of ACTIVATIONS) {
    const least = { promised: guarantee(id, activation) !== null, norm: Infinity };
    for (let seed = 0; seed < 24; seed++) {
      const features = [2, 4, 6, 8][seed % 4];
      const layers = [1, 3, 16, 64, 100, 256][seed % 6];
      const init = seed % 2 ? "paper" : "scaled";
      const T = [0.5, 2.4, 8][seed % 3];
      const net = createNetwork({ network: id, features, layers, activation, T, seed, init });
      const Y = Float64Array.from({ length: 5 * features }, (_, i) => Math.sin(7 * i + seed));
      for (const norm of norms(net, Y, 5).min) least.norm = Math.min(least.norm, norm);
    }
    least.norm = String(least.norm);
    smallest[`${id} ${activation}`] = least;
  }
}
process.stdout.write(JSON.stringify(smallest));
