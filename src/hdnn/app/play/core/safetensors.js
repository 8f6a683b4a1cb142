/**
 * Models as files that hdnn.load reads, and files of hdnn.save as models.
 *
 * A safetensors file is the length of a JSON text (8 bytes), the text, and the numbers. Its
 * metadata hold the config of the model and a checksum: see hdnn.serialization.
 */

import { activationOf } from "./activations.js";
import { createAugment } from "./model.js";
import { KINDS, MOST_FEATURES, MOST_LAYERS, emptyNetwork } from "./networks.js";
import { sha256 } from "./sha256.js";

const LARGEST = 8 * 2 ** 20; // bytes: the largest model of the page has a tenth of that
const FORMAT = 1;
const NAMES = { h2: "H2", h1: "H1", verlet: "HamiltonianNet", ms1: "MS1", ms2: "MS2", ms3: "MS3", mlp: "MLP" };
const INTEGRATORS = { semi_implicit_euler: "h2", forward_euler: "h1", verlet: "verlet" };
const TYPES = { F64: [Float64Array, "torch.float64"], F32: [Float32Array, "torch.float32"] };

/** The bytes of a file that hdnn.load reads as Model(Augment, network, SigmoidHead). */
export function toSafetensors({ augment, net, head }, { version = "playground" } = {}) {
  const tensors = {
    "head.bias": { values: head.bias, shape: [1] },
    "head.weight": { values: head.weight, shape: [1, net.features] },
  };
  for (const name of Object.keys(net.weights).sort()) {
    tensors[`net.${name}`] = { values: net.weights[name], shape: net.shapes[name] };
  }
  const about = { format: FORMAT, kind: "Model", parts: partsOf(augment, net), version };
  const sum = checksum(pythonJson(about), Object.entries(tensors).map(([name, tensor]) =>
    ({ name, dtype: "F64", ...tensor, bytes: bytesOf(tensor.values) })));
  const header = { __metadata__: { hdnn: pythonJson({ ...about, sha256: sum }) } };
  let at = 0;
  for (const [name, { values, shape }] of Object.entries(tensors)) {
    header[name] = { dtype: "F64", shape, data_offsets: [at, at + values.byteLength] };
    at += values.byteLength;
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (text.length % 8)) % 8); // so that the numbers are aligned
  const bytes = new Uint8Array(8 + text.length + at);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(new TextEncoder().encode(text), 8);
  at = 8 + text.length;
  for (const { values } of Object.values(tensors)) {
    bytes.set(bytesOf(values), at);
    at += values.byteLength;
  }
  return bytes;
}

function partsOf(augment, net) {
  const { network, features, layers, activation, h } = net;
  const config = { activation, features, layers, tied: false };
  if (network !== "mlp") Object.assign(config, { learn_step: false, step: new Float(h) });
  if (["h2", "verlet"].includes(network)) Object.assign(config, { learn_X: false, sparsity: null });
  if (network === "h1") Object.assign(config, { learn_J: false, sparsity: null });
  if (network === "verlet") config.integrator = "verlet";
  const { inputs, placement } = augment;
  return {
    augment: { config: { features, inputs, placement }, kind: "Augment" },
    head: { config: { features }, kind: "SigmoidHead" },
    net: { config, constants: {}, kind: NAMES[network] },
  };
}

/** The model {augment, net, head} in a file; an Error that says in one sentence why not. */
export function fromSafetensors(given) {
  const bytes = given instanceof ArrayBuffer ? new Uint8Array(given) : bytesOf(given);
  const { text, tensors } = readTensors(bytes);
  const about = parseObject(text, "This safetensors file was not written by hdnn.");
  if (!Number.isInteger(about?.format)) refuse("This safetensors file was not written by hdnn.");
  if (about.format > FORMAT) refuse("This file was written by a newer hdnn than this page knows.");
  checkTensors(about, text, tensors);
  const parts = about.parts ?? {};
  if (about.kind !== "Model" || !parts.augment || !parts.net || !parts.head) {
    refuse("This file holds no model of two inputs, a network and an output layer.");
  }
  if (parts.head.kind !== "SigmoidHead") {
    refuse(`The page draws models of two classes (SigmoidHead), but this one ends in a ${clipped(parts.head.kind)}.`);
  }
  const net = networkOf(parts.net);
  const { inputs, features, placement } = parts.augment.config ?? {};
  if (inputs !== 2) refuse(`The page draws models of 2 inputs, but this one has ${clipped(inputs)}.`);
  if (features !== net.features || parts.head.config?.features !== net.features) {
    refuse("The parts of this model do not have the same number of features.");
  }
  if (!Array.isArray(placement) && !["split", "first"].includes(placement)) {
    refuse(`This model places its inputs in a way that the page does not know.`);
  }
  const augment = createAugment(features, placement);
  const head = { weight: new Float64Array(features), bias: new Float64Array(1) };
  const wanted = { "head.weight": [head.weight, [1, features]], "head.bias": [head.bias, [1]] };
  for (const [name, shape] of Object.entries(net.shapes)) {
    wanted[`net.${name}`] = [net.weights[name], shape];
  }
  fillWeights(wanted, tensors);
  return { augment, net, head };
}

/** The text of hdnn in the metadata, and all tensors, if the file is whole. */
function readTensors(bytes) {
  const damaged = "This is no safetensors file, or it is damaged.";
  if (bytes.length > LARGEST) {
    refuse(`The file is too large: ${(bytes.length / 2 ** 20).toFixed(1)} MiB, and the page reads ` +
      `up to ${LARGEST / 2 ** 20}.`);
  }
  if (bytes.length < 10 || bytes[8] !== 0x7b) refuse(damaged); // the text begins with a {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const length = Number(view.getBigUint64(0, true));
  if (length > bytes.length - 8) refuse("The file is truncated: a part of it is missing.");
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length));
  } catch {
    refuse(damaged);
  }
  const header = parseObject(text, damaged);
  const found = new Map();
  let end = 8 + length;
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [low, high] = Array.isArray(entry?.data_offsets) ? entry.data_offsets : [];
    const fine = Number.isInteger(low) && Number.isInteger(high) && 0 <= low && low <= high &&
      Array.isArray(entry.shape) && typeof entry.dtype === "string";
    if (!fine) refuse(damaged);
    if (8 + length + high > bytes.length) refuse("The file is truncated: a part of it is missing.");
    end = Math.max(end, 8 + length + high);
    const part = bytes.slice(8 + length + low, 8 + length + high);
    found.set(name, { name, dtype: entry.dtype, shape: entry.shape, bytes: part });
  }
  if (end !== bytes.length) refuse(damaged);
  const about = header.__metadata__?.hdnn;
  if (typeof about !== "string") refuse("This safetensors file was not written by hdnn.");
  return { text: about, tensors: found };
}

function checkTensors(about, text, tensors) {
  for (const { name, dtype } of tensors.values()) {
    if (!Object.hasOwn(TYPES, dtype)) {
      refuse(`The weights must be float64 or float32, but ${clipped(name)} is ${clipped(dtype)}.`);
    }
  }
  if (about.sha256 === undefined) return; // files of early versions have none
  // As hdnn writes it, the text is that of the checksum with the checksum itself put in.
  const rest = text.replace(`"sha256": "${about.sha256}", `, "");
  const sorted = [...tensors.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  if (checksum(rest, sorted) !== about.sha256) {
    refuse("The file is damaged: its contents do not have the checksum that was written with them.");
  }
}

function checksum(text, tensors) {
  const parts = [new TextEncoder().encode(text)];
  for (const { name, dtype, shape, bytes } of tensors) {
    const tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
    parts.push(new TextEncoder().encode(`${name} ${TYPES[dtype][1]} ${tuple} `), bytes);
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return sha256(whole);
}

/** A network of zeros, of the kind and the sizes that a file describes. */
function networkOf(part) {
  const config = part.config ?? {};
  let network = Object.keys(NAMES).find((id) => id !== "verlet" && NAMES[id] === part.kind);
  if (part.kind === "HamiltonianNet") network = ownValue(INTEGRATORS, config.integrator);
  if (!network) {
    const kind = part.kind === "HamiltonianNet" ? config.integrator : part.kind;
    refuse(`The page does not offer the network ${clipped(kind)}; it has ${titlesOfAll()}.`);
  }
  const { features, layers, activation, step } = config;
  if (!(Number.isInteger(features) && features >= 2 && features <= MOST_FEATURES)) {
    refuse(`The page takes networks of 2 to ${MOST_FEATURES} features, but this one has ${clipped(features)}.`);
  }
  if (!(Number.isInteger(layers) && layers >= 1 && layers <= MOST_LAYERS)) {
    refuse(`The page takes networks of 1 to ${MOST_LAYERS} layers, but this one has ${clipped(layers)}.`);
  }
  activationOf(clipped(activation));
  const special = Object.entries({
    "tied layers": config.tied,
    "learned steps": config.learn_step,
    "a learned X or J": config.learn_X || config.learn_J,
    "a sparsity pattern": config.sparsity,
    "an X or J of its own": Object.keys(part.constants ?? {}).length,
    "another step in each layer": Array.isArray(step),
  }).find(([, given]) => given);
  if (special) refuse(`This network has ${special[0]}, which the page does not offer.`);
  return emptyNetwork({ network, features, layers, activation, h: step });
}

function fillWeights(wanted, tensors) {
  for (const name of tensors.keys()) {
    if (!Object.hasOwn(wanted, name)) refuse(`${clipped(name)} in this file is no weight of its model.`);
  }
  for (const [name, [values, shape]] of Object.entries(wanted)) {
    const tensor = tensors.get(name);
    if (!tensor) refuse(`The weight ${name} is missing in this file.`);
    const [Type] = TYPES[tensor.dtype];
    const fits = String(tensor.shape) === String(shape) &&
      tensor.bytes.length === values.length * Type.BYTES_PER_ELEMENT;
    if (!fits) refuse(`The weight ${name} has shape (${clipped(tensor.shape)}), but (${shape}) is needed.`);
    values.set(new Type(tensor.bytes.buffer));
    if (!values.every(Number.isFinite)) refuse(`The weight ${name} holds NaN or infinite numbers.`);
  }
}

// Text

/** A number that Python writes as a float. */
class Float {
  constructor(value) {
    this.value = value;
  }
}

/** JSON as Python's json.dumps(.., sort_keys=True) writes it: the checksum is of that text. */
function pythonJson(value) {
  if (value instanceof Float) return pythonFloat(value.value);
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const parts = Object.keys(value).sort().map((k) => `${JSON.stringify(k)}: ${pythonJson(value[k])}`);
    return `{${parts.join(", ")}}`;
  }
  return JSON.stringify(value);
}

function pythonFloat(x) {
  if (x >= 1e16 || x < 1e-4) {
    return x.toExponential().replace(/e([-+])(\d)$/, "e$10$2");
  }
  return Number.isInteger(x) ? `${x}.0` : String(x);
}

function parseObject(text, otherwise) {
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) return value;
  } catch {
    // said below
  }
  return refuse(otherwise);
}

function refuse(sentence) {
  throw new Error(sentence);
}

function clipped(given) {
  return String(given).slice(0, 40);
}

function ownValue(table, key) {
  return Object.hasOwn(table, key) ? table[key] : undefined;
}

function titlesOfAll() {
  return Object.values(KINDS).map(({ title }) => title).join(", ");
}

function bytesOf(values) {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}
