/** The arithmetic of the playground: no page, no worker, no dependency. */

export { ACTIVATIONS, MONOTONE } from "./activations.js";
export { parseCsv } from "./csv.js";
export { datasets } from "./data.js";
export { evaluate, predict } from "./model.js";
export { NETWORKS, createNetwork, guarantee, shapesOf, splits } from "./networks.js";
export { everyNorm, norms, normsOf } from "./norms.js";
export { OPTIMISERS } from "./optimisers.js";
export { forward, gradients, trajectory } from "./passes.js";
export { rescaled } from "./scaling.js";
export { fromSafetensors, toSafetensors } from "./safetensors.js";
export { createTrainer } from "./training.js";
