// Files that come in, CSV or safetensors, and the networks that go out.
import { askOnce } from "./engine.js";

const MOST_TEXT = 4 * 2 ** 20; // bytes of a CSV file
const MOST_BYTES = 8 * 2 ** 20; // of a network
const WAIT = 20000; // ms

// What is in a file: {kind: "csv", name, table} or {kind: "network", name, bytes, found}.
export async function opened(file) {
  const isNetwork = /\.safetensors$/i.test(file.name) || (await looksBinary(file));
  const most = isNetwork ? MOST_BYTES : MOST_TEXT;
  if (file.size > most) {
    const limit = `${most / 2 ** 20} MB`;
    throw new Error(`${file.name} has ${Math.ceil(file.size / 2 ** 20)} MB; this page takes ${isNetwork ? "networks" : "CSV files"} of up to ${limit}.`);
  }
  if (!isNetwork) {
    const table = await askOnce("csv", { text: await file.text() }, WAIT);
    return { kind: "csv", name: file.name, table };
  }
  const bytes = new Uint8Array(await file.arrayBuffer());
  return { kind: "network", name: file.name, bytes, found: await askOnce("inspect", { bytes }, WAIT) };
}

async function looksBinary(file) {
  const start = new Uint8Array(await file.slice(0, 512).arrayBuffer());
  return start.includes(0);
}

export function save(bytes, name) {
  const address = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Files that are dropped anywhere on the page.
export function listenForDrops(take) {
  const over = (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  };
  addEventListener("dragenter", over);
  addEventListener("dragover", over);
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}
