// Trains a model from a file of hdnn's, and writes it to another: see test_core_training.py.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [core, file] = process.argv.slice(2);
const { createTrainer, fromSafetensors, toSafetensors } = await import(pathToFileURL(core).href);

for (const { before, after, x, t, count, ...options } of JSON.parse(readFileSync(file, "utf8"))) {
  const data = { x: Float64Array.from(x), t: Uint8Array.from(t) };
  const trainer = createTrainer({ ...options, data, model: fromSafetensors(readFileSync(before)) });
  for (let k = 0; k < count; k++) trainer.step();
  writeFileSync(after, toSafetensors(trainer));
}
