/** Models as files that hdnn.load reads, and files of hdnn.save as models: hdnn.serialization. */

import { createHead } from "./head.js";
import { createAugment } from "./model.js";
import { KINDS, MOST_FEATURES, MOST_LAYERS, emptyNetwork } from "./networks.js";
import { PythonFloat } from "./python_json.js";
import { clipped, packed, refuse, unpacked } from "./tensorfile.js";

const FORMAT = 1;
const CLASSES = { H2: "h2", H1: "h1", MS1: "ms1", MS2: "ms2", MS3: "ms3", MLP: "mlp" };
const INTEGRATORS = { semi_implicit_euler: "h2", forward_euler: "h1", verlet: "verlet" };

/** The bytes of a file that hdnn.load reads as Model(Augment, network, SigmoidHead). */
export function toSafetensors({ augment, net, head }, { version = "playground" } = {}) {
  const tensors = {
    "head.bias": { values: head.bias, shape: [1] },
    "head.weight": { values: head.weight, shape: [1, net.features] },
  };
  for (const [name, values] of Object.entries(net.weights)) {
    tensors[`net.${name}`] = { values, shape: net.shapes[name] };
  }
  const about = { format: FORMAT, kind: "Model", parts: partsOf(augment, net), version };
  return packed(tensors, "hdnn", about);
}

/** The model {augment, net, head} in a file; an Error that says in one sentence why not. */
export function fromSafetensors(bytes) {
  const { about, tensors } = unpacked(bytes, "hdnn");
  if (!Number.isInteger(about.format)) refuse("This safetensors file was not written by hdnn.");
  if (about.format > FORMAT) refuse("This file was written by a newer hdnn than this page knows.");
  const parts = about.parts ?? {};
  if (about.kind !== "Model" || !parts.augment || !parts.net || !parts.head) {
    refuse("This file holds no model of two inputs, a network and an output layer.");
  }
  if (parts.head.kind !== "SigmoidHead") {
    refuse("The page draws models of two classes that end in a SigmoidHead, but this one ends in " +
      `a ${clipped(parts.head.kind)}.`);
  }
  const net = networkOf(parts.net);
  const { inputs, features, placement } = parts.augment.config ?? {};
  if (inputs !== 2) {
    refuse(`The page draws models of 2 inputs, but this one has ${clipped(inputs)}.`);
  }
  if (features !== net.features || parts.head.config?.features !== net.features) {
    refuse("The parts of this model do not have the same number of features.");
  }
  if (!Array.isArray(placement) && !["split", "first"].includes(placement)) {
    refuse("This model places its inputs in a way that the page does not know.");
  }
  const model = { augment: createAugment(features, placement), net, head: createHead(features) };
  const { weight, bias } = model.head;
  const wanted = { "head.weight": [weight, [1, features]], "head.bias": [bias, [1]] };
  for (const [name, shape] of Object.entries(net.shapes)) {
    wanted[`net.${name}`] = [net.weights[name], shape];
  }
  fillWeights(wanted, tensors);
  return model;
}

/** What hdnn writes of the parts of such a model. */
function partsOf(augment, net) {
  const { network, features, layers, activation, h } = net;
  const config = { activation, features, layers, tied: false };
  if (network !== "mlp") Object.assign(config, { learn_step: false, step: new PythonFloat(h) });
  if (["h2", "verlet"].includes(network)) Object.assign(config, { learn_X: false, sparsity: null });
  if (network === "h1") Object.assign(config, { learn_J: false, sparsity: null });
  if (network === "verlet") config.integrator = "verlet";
  const kind = Object.keys(CLASSES).find((name) => CLASSES[name] === network) ?? "HamiltonianNet";
  const { inputs, placement } = augment;
  return {
    augment: { config: { features, inputs, placement }, kind: "Augment" },
    head: { config: { features }, kind: "SigmoidHead" },
    net: { config, constants: {}, kind },
  };
}

/** A network of zeros, of the kind and the sizes that a file describes. */
function networkOf({ kind, config, constants }) {
  const given = config ?? {};
  const general = kind === "HamiltonianNet";
  const [table, name] = general ? [INTEGRATORS, given.integrator] : [CLASSES, kind];
  if (!Object.hasOwn(table, name)) {
    const known = Object.values(KINDS).map(({ title }) => title).join(", ");
    refuse(`The page does not offer the network ${clipped(name)}; it has ${known}.`);
  }
  const { features, layers, step } = given;
  const sizes = { features: [features, 2, MOST_FEATURES], layers: [layers, 1, MOST_LAYERS] };
  for (const [what, [size, least, most]] of Object.entries(sizes)) {
    if (!(Number.isInteger(size) && size >= least && size <= most)) {
      refuse(`The page takes networks of ${least} to ${most} ${what}, but this one has ` +
        `${clipped(size)}.`);
    }
  }
  const special = Object.entries({
    "tied layers": given.tied,
    "learned steps": given.learn_step,
    "a learned X or J": given.learn_X || given.learn_J,
    "a sparsity pattern": given.sparsity,
    "an X or J of its own": Object.keys(constants ?? {}).length,
    "a step of its own in each layer": Array.isArray(step),
  }).find(([, is]) => is);
  if (special) refuse(`This network has ${special[0]}, which the page does not offer.`);
  const activation = clipped(given.activation);
  return emptyNetwork({ network: table[name], features, layers, activation, h: step });
}

function fillWeights(wanted, tensors) {
  for (const name of tensors.keys()) {
    if (!Object.hasOwn(wanted, name)) {
      refuse(`${clipped(name)} in this file is no weight of its model.`);
    }
  }
  for (const [name, [values, shape]] of Object.entries(wanted)) {
    const tensor = tensors.get(name);
    if (!tensor) refuse(`The weight ${name} is missing in this file.`);
    if (String(tensor.shape) !== String(shape)) {
      refuse(`The weight ${name} has shape (${clipped(tensor.shape)}), but (${shape}) is needed.`);
    }
    values.set(tensor.values);
    if (!values.every(Number.isFinite)) refuse(`The weight ${name} holds NaN or infinite numbers.`);
  }
}
