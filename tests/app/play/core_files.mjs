// What the core makes of files, texts and data sets: see test_core_files.py.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [core, file] = process.argv.slice(2);
const {
  createTrainer, datasets, fromSafetensors, parseCsv, predict, rescaled, toSafetensors,
} = await import(pathToFileURL(core).href);

const JOBS = {
  // A trained model: its file, and what it predicts.
  write({ to, x, ...options }) {
    const trainer = createTrainer({ ...options, data: datasets.double_moons(200, { seed: 1 }) });
    for (let k = 0; k < 3; k++) trainer.step();
    writeFileSync(to, toSafetensors(trainer));
    return Array.from(trainer.predict(Float64Array.from(x)));
  },
  // What a model from a file predicts, and whether it is the same after another round.
  read({ from, x }) {
    const model = fromSafetensors(readFileSync(from));
    const points = Float64Array.from(x);
    const found = Array.from(predict(model, points));
    const again = Array.from(predict(fromSafetensors(toSafetensors(model)), points));
    if (String(found) !== String(again)) throw new Error("It differs after another round.");
    return found;
  },
  csv({ text }) {
    const { x, t, names, labels, domain } = parseCsv(text);
    return { x: Array.from(x), t: Array.from(t), names, labels, domain };
  },
  rescale({ x, domain }) {
    const found = rescaled({ x: Float64Array.from(x), domain });
    return { ...found, x: Array.from(found.x) };
  },
  data({ name, points, options }) {
    const { x, t, domain } = datasets[name](points, options);
    return { x: Array.from(x), t: Array.from(t), domain };
  },
};

function answer({ job, ...given }) {
  try {
    return { value: JOBS[job](given) };
  } catch (error) {
    return { error: error.message, kind: error.name };
  }
}

process.stdout.write(JSON.stringify(JSON.parse(readFileSync(file, "utf8")).map(answer)));
