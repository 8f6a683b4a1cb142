/**
 * Safetensors files with a JSON text in their metadata and a checksum: hdnn.base.tensorfile.
 *
 * A file is the length of its header (8 bytes), the header in JSON, and the numbers.
 */

import { pythonJson } from "./python_json.js";
import { sha256 } from "./sha256.js";

const LARGEST = 8 * 2 ** 20; // bytes: the largest model of the page has a tenth of that
const TYPES = { F64: [Float64Array, "torch.float64"], F32: [Float32Array, "torch.float32"] };
const DAMAGED = "This is no safetensors file, or it is damaged.";
const TRUNCATED = "The file is truncated: a part of it is missing.";
const FOREIGN = "This safetensors file was not written by hdnn.";

/** The bytes of a file with these tensors, {name: {values: Float64Array, shape}}. */
export function packed(tensors, key, about) {
  const sorted = Object.keys(tensors).sort().map((name) => {
    const { values, shape } = tensors[name];
    return { name, dtype: "F64", shape, bytes: bytesOf(values) };
  });
  const sum = checksum(pythonJson(about), sorted);
  const header = { __metadata__: { [key]: pythonJson({ ...about, sha256: sum }) } };
  let at = 0;
  for (const { name, dtype, shape, bytes } of sorted) {
    header[name] = { dtype, shape, data_offsets: [at, at + bytes.length] };
    at += bytes.length;
  }
  const encoded = new TextEncoder().encode(JSON.stringify(header));
  const begin = 8 + 8 * Math.ceil(encoded.length / 8); // so that the numbers are aligned
  const file = new Uint8Array(begin + at).fill(0x20, 8, begin);
  new DataView(file.buffer).setBigUint64(0, BigInt(begin - 8), true);
  file.set(encoded, 8);
  at = begin;
  for (const { bytes } of sorted) {
    file.set(bytes, at);
    at += bytes.length;
  }
  return file;
}

/** The text under a key and all tensors, a Map of {shape, values}, if the file is whole. */
export function unpacked(given, key) {
  const bytes = given instanceof ArrayBuffer ? new Uint8Array(given) : bytesOf(given);
  if (bytes.length > LARGEST) {
    const size = (bytes.length / 2 ** 20).toFixed(1);
    refuse(`The file is too large: ${size} MiB, and the page reads up to ${LARGEST / 2 ** 20}.`);
  }
  if (bytes.length < 10 || bytes[8] !== 0x7b) refuse(DAMAGED); // a header begins with {
  const length = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
  if (length > bytes.length - 8) refuse(TRUNCATED);
  const begin = 8 + Number(length);
  const header = parseObject(decoded(bytes.subarray(8, begin)), DAMAGED);
  const tensors = new Map();
  let end = begin;
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const tensor = tensorOf(name, entry, bytes, begin);
    end = Math.max(end, begin + entry.data_offsets[1]);
    tensors.set(name, tensor);
  }
  if (end !== bytes.length) refuse(DAMAGED);
  const text = header.__metadata__?.[key];
  if (typeof text !== "string") refuse(FOREIGN);
  const about = parseObject(text, FOREIGN);
  checkSum(about, text, tensors);
  return { about, tensors };
}

/** Stop, and say why in one sentence. */
export function refuse(sentence) {
  throw new Error(sentence);
}

/** What a file says, short enough to be shown. */
export function clipped(given) {
  return String(given).slice(0, 40);
}

function tensorOf(name, entry, bytes, begin) {
  const [low, high] = Array.isArray(entry?.data_offsets) ? entry.data_offsets : [];
  const { dtype, shape } = entry ?? {};
  const whole = (x) => Number.isInteger(x) && x >= 0;
  if (!(whole(low) && whole(high) && low <= high && Array.isArray(shape) && shape.every(whole))) {
    refuse(DAMAGED);
  }
  if (begin + high > bytes.length) refuse(TRUNCATED);
  if (!Object.hasOwn(TYPES, dtype)) {
    refuse(`The weights must be float64 or float32, but ${clipped(name)} is ${clipped(dtype)}.`);
  }
  const [Type] = TYPES[dtype];
  const count = shape.reduce((a, b) => a * b, 1);
  if (high - low !== count * Type.BYTES_PER_ELEMENT) refuse(DAMAGED);
  const part = bytes.slice(begin + low, begin + high);
  return { name, dtype, shape, bytes: part, values: new Type(part.buffer) };
}

function checkSum(about, text, tensors) {
  if (about.sha256 === undefined) return; // files of early versions have none
  // The checksum is of the text as it is without the checksum; keys are sorted, and some follow.
  const rest = text.replace(`"sha256": "${about.sha256}", `, "");
  const sorted = [...tensors.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  if (checksum(rest, sorted) !== about.sha256) {
    refuse("The file is damaged: its contents do not have the checksum written with them.");
  }
}

function checksum(text, tensors) {
  const encoder = new TextEncoder();
  const parts = [encoder.encode(text)];
  for (const { name, dtype, shape, bytes } of tensors) {
    const tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
    parts.push(encoder.encode(`${name} ${TYPES[dtype][1]} ${tuple} `), bytes);
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return sha256(whole);
}

function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return refuse(DAMAGED);
  }
}

function parseObject(text, otherwise) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    refuse(otherwise);
  }
  const fine = value !== null && typeof value === "object" && !Array.isArray(value);
  return fine ? value : refuse(otherwise);
}

function bytesOf(values) {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}
