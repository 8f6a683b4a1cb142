/**
 * Models as files that hdnn.load reads, and files of hdnn.save as models: hdnn.io.
 *
 * A file is the length of its header (8 bytes), the header in JSON, and the numbers. The metadata
 * have one entry: a checksum, and a description of the model.
 */

import { createHead } from "./head.js";
import { createAugment } from "./model.js";
import { KINDS, emptyNetwork } from "./networks.js";
import { sha256 } from "./sha256.js";

const LARGEST = 8 * 2 ** 20; // bytes: the largest model of the page has a tenth of that
const TYPES = { F64: [Float64Array, "torch.float64"], F32: [Float32Array, "torch.float32"] };
const CLASSES = { H2: "h2", H1: "h1", MLP: "mlp" };
const INTEGRATORS = { semi_implicit_euler: "h2", forward_euler: "h1" };
const DAMAGED = "This is no safetensors file, or it is damaged.";
const FOREIGN = "This safetensors file was not written by hdnn.";

/** The bytes of a file that hdnn.load reads as Model(Augment, network, SigmoidHead). */
export function toSafetensors(model, { version = "playground" } = {}) {
  const tensors = Object.entries(tensorsOf(model)).sort().map(([name, [values, shape]]) =>
    ({ name, dtype: "F64", shape, bytes: bytesOf(values) }));
  const text = pythonJson({ model: description(model), note: null, version });
  const entry = `{"sha256": "${checksum(text, tensors)}", "metadata": ${text}}`;
  const header = { __metadata__: { hdnn: entry } };
  let at = 0;
  for (const { name, dtype, shape, bytes } of tensors) {
    header[name] = { dtype, shape, data_offsets: [at, at + bytes.length] };
    at += bytes.length;
  }
  const encoded = new TextEncoder().encode(JSON.stringify(header));
  const begin = 8 + 8 * Math.ceil(encoded.length / 8); // so that the numbers are aligned
  const file = new Uint8Array(begin + at).fill(0x20, 8, begin);
  new DataView(file.buffer).setBigUint64(0, BigInt(begin - 8), true);
  file.set(encoded, 8);
  for (const { name, bytes } of tensors) file.set(bytes, begin + header[name].data_offsets[0]);
  return file;
}

/** The model {augment, net, head} in a file; an Error that says in one sentence why not. */
export function fromSafetensors(bytes) {
  const { metadata, tensors } = unpackedFile(bytes);
  const { augment, net: layers, head } = metadata.model?.modules ?? {};
  if (metadata.model?.class !== "Model" || !augment || !layers || !head) {
    refuse("This file holds no model of two inputs, a network and an output layer.");
  }
  if (head.class !== "SigmoidHead") {
    refuse("The page draws models of two classes that end in a SigmoidHead, but this one ends in " +
      `a ${clipped(head.class)}.`);
  }
  const net = networkOf(layers);
  const { inputs, features, placement } = augment.config ?? {};
  if (inputs !== 2) {
    refuse(`The page draws models of 2 inputs, but this one has ${clipped(inputs)}.`);
  }
  if (features !== net.features || head.config?.features !== net.features) {
    refuse("The parts of this model do not have the same number of features.");
  }
  if (!Array.isArray(placement) && !["split", "first"].includes(placement)) {
    refuse("This model places its inputs in a way that the page does not know.");
  }
  const model = { augment: createAugment(features, placement), net, head: createHead(features) };
  fillWeights(tensorsOf(model), tensors);
  return model;
}

/** All weights with their shapes, by hdnn's names. */
function tensorsOf({ net, head }) {
  const tensors = { "head.weight": [head.weight, [1, net.features]], "head.bias": [head.bias, [1]] };
  for (const [name, shape] of Object.entries(net.shapes)) {
    tensors[`net.${name}`] = [net.weights[name], shape];
  }
  return tensors;
}

/** The description that hdnn writes of such a model. */
function description({ augment, net }) {
  const { network, features, layers, activation, h } = net;
  const config = { activation, features, layers, tied: false };
  if (network !== "mlp") Object.assign(config, { learn_step: false, sparsity: null, step: h });
  const kind = Object.keys(CLASSES).find((name) => CLASSES[name] === network) ;
  const { inputs, placement } = augment;
  const modules = {
    augment: { class: "Augment", config: { features, inputs, placement }, modules: {} },
    net: { class: kind, config, constants: {}, modules: {} },
    head: { class: "SigmoidHead", config: { features }, modules: {} },
  };
  return { class: "Model", config: {}, modules };
}

/** A network of zeros, of the kind and the sizes that a file describes. */
function networkOf({ class: kind, config, constants }) {
  const given = config ?? {};
  const general = kind === "HamiltonianNet";
  const [table, name] = general ? [INTEGRATORS, given.integrator] : [CLASSES, kind];
  if (!Object.hasOwn(table, name)) {
    const known = Object.values(KINDS).map(({ title }) => title).join(", ");
    refuse(`The page does not offer the network ${clipped(name)}; it has ${known}.`);
  }
  const { features, layers, step } = given;
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
    if (!Object.hasOwn(wanted, name)) refuse(`${clipped(name)} is no weight of this model.`);
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

/** The metadata and all tensors, a Map of {shape, values}, if the file is undamaged. */
function unpackedFile(given) {
  const bytes = given instanceof ArrayBuffer ? new Uint8Array(given) : bytesOf(given);
  if (bytes.length > LARGEST) refuse("The file is too large: the page reads up to 8 MiB.");
  if (bytes.length < 10 || bytes[8] !== 0x7b) refuse(DAMAGED); // a header begins with {
  const length = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
  if (length > bytes.length - 8) refuse(DAMAGED);
  const begin = 8 + Number(length);
  const { __metadata__, ...entries } = parsed(new TextDecoder().decode(bytes.subarray(8, begin)));
  const tensors = new Map();
  for (const [name, entry] of Object.entries(entries)) {
    tensors.set(name, tensorOf(name, entry, bytes.subarray(begin)));
  }
  const text = __metadata__?.hdnn;
  if (typeof text !== "string") refuse(FOREIGN);
  const { sha256: sum, metadata } = parsed(text);
  if (!metadata) refuse(FOREIGN);
  const own = text.slice(text.indexOf('"metadata": ') + 12, -1); // the text as it was summed
  const sorted = [...tensors.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  if (checksum(own, sorted) !== sum) {
    refuse("The file is damaged: its contents do not have the checksum written with them.");
  }
  return { metadata, tensors };
}

function tensorOf(name, entry, bytes) {
  const [low, high] = entry?.data_offsets ?? [];
  const { dtype, shape } = entry ?? {};
  if (!(low >= 0 && high >= low && high <= bytes.length && Array.isArray(shape))) refuse(DAMAGED);
  if (!Object.hasOwn(TYPES, dtype)) {
    refuse(`The weights must be float64 or float32, but ${clipped(name)} is ${clipped(dtype)}.`);
  }
  const [Type] = TYPES[dtype];
  const count = shape.reduce((a, b) => a * b, 1);
  if (high - low !== count * Type.BYTES_PER_ELEMENT) refuse(DAMAGED);
  const own = bytes.slice(low, high);
  return { name, dtype, shape, bytes: own, values: new Type(own.buffer) };
}

function checksum(text, tensors) {
  const encoder = new TextEncoder();
  const parts = [encoder.encode(text)];
  for (const { name, dtype, shape, bytes } of tensors) {
    const tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
    parts.push(encoder.encode(`${name} ${TYPES[dtype][1]} ${tuple} `), bytes);
  }
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return sha256(all);
}

/** JSON as Python's json.dumps(.., sort_keys=True) writes it: checksums are of that very text. */
function pythonJson(value) {
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const entry = (key) => `${JSON.stringify(key)}: ${pythonJson(value[key])}`;
    return `{${Object.keys(value).sort().map(entry).join(", ")}}`;
  }
  // Both languages find the same digits of a number, but write exponents otherwise.
  const small = typeof value === "number" && value > 0 && value < 1e-4;
  return small ? value.toExponential().replace(/e-(\d)$/, "e-0$1") : JSON.stringify(value);
}

function parsed(text) {
  try {
    return Object(JSON.parse(text));
  } catch {
    return refuse(DAMAGED);
  }
}

function refuse(sentence) {
  throw new Error(sentence);
}

function clipped(value) {
  return String(value).slice(0, 40);
}

function bytesOf(values) {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}
