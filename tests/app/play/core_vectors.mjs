// Reads cases from a JSON file and prints what the core computes for each: see test_core.py.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [core, file] = process.argv.slice(2);
const { createNetwork, forward, gradients, norms, normsOf, trajectory } = await import(
  pathToFileURL(core).href
);

const list = (values) => Array.from(values, (x) => (Number.isFinite(x) ? x : String(x)));

function found({ weights, Y, G, B, ...options }) {
  const net = createNetwork(options);
  for (const [name, values] of Object.entries(weights)) {
    if (net.weights[name]?.length !== values.length) throw new Error(`${options.network} ${name}`);
    net.weights[name].set(values);
  }
  const y = Float64Array.from(Y);
  const backward = gradients(net, y, B, Float64Array.from(G));
  const measured = norms(net, y, B);
  return {
    shapes: net.shapes,
    forward: list(forward(net, y, B)),
    trajectory: list(trajectory(net, y, B)),
    y0: list(backward.y0),
    weights: Object.fromEntries(Object.entries(backward.weights).map(([k, v]) => [k, list(v)])),
    norms: [measured.min, measured.median, measured.max].map(list),
    single: list(normsOf(net, y.subarray(0, options.features))),
  };
}

process.stdout.write(JSON.stringify(JSON.parse(readFileSync(file, "utf8")).map(found)));
