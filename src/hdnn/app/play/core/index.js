/** The arithmetic of the playground: no page, no worker, no dependency. */

export { ACTIVATIONS, MONOTONE } from "./activations.js";
export { NETWORKS, createNetwork, guarantee, shapesOf, splits } from "./networks.js";
export { norms, normsOf, everyNorm } from "./norms.js";
export { forward, gradients, trajectory } from "./passes.js";
