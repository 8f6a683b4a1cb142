// All arithmetic of the page. It works in short pieces, and listens to the page between them.
import { parseCsv, rescaled } from "./core/csv.js";
import { datasets } from "./core/data.js";
import { guarantee, hasStep } from "./core/networks.js";
import { fromSafetensors, toSafetensors } from "./core/safetensors.js";
import { createTrainer } from "./core/training.js";

const SIDES = ["left", "right"];
const PIECE = 16; // ms of work between two looks at the messages
const COARSE = 64; // cells of a picture along each side, while training goes on
const FINE = 100; // the same when it does not
const CHUNK = 400; // points that are computed in one go
const MOST_TESTED = 2000; // points that accuracy and loss are measured on
const NORM_SAMPLES = 48; // samples that norms are measured on
const MOST_SHOWN = 700; // points that are drawn
const SHARE = 3; // training takes this many times as long as measuring

const trainers = {};
let settings = null;
let before = 0; // steps that were taken before the points changed
let tested = null;
let domain = null;
let running = false;
let planned = false;
let measuring = null; // the picture that is being computed
let nextPicture = 0;
let counted = { steps: 0, since: 0 };
let rest = 0; // ms between pictures at least

self.onmessage = ({ data: message }) => {
  try {
    HANDLERS[message.type](message);
  } catch (error) {
    running = false;
    self.postMessage({ type: "error", id: message.id, message: error.message });
  }
};

const HANDLERS = {
  setup,
  run() {
    running = true;
    counted = { steps: 0, since: performance.now() };
    nextPicture = 0;
    plan();
  },
  pause() {
    running = false;
    measuring = picture(FINE);
    self.postMessage({ type: "paused" });
    plan();
  },
  // Other points for the same networks, which go on with the weights that they have.
  data({ points }) {
    before += trainers.left.stepCount;
    learn(points, { ...trainers });
  },
  // A point of the picture at another place; it is one of those that are learned.
  move({ index, place }) {
    trainers.left.data.x.set(place, 2 * index);
    if (!running) measuring = picture(FINE);
    plan();
  },
  rate({ rate }) {
    settings.rate = rate;
    for (const side of SIDES) trainers[side].setRate(rate);
  },
  download({ id, side }) {
    const bytes = toSafetensors(trainers[side]);
    self.postMessage({ type: "answer", id, value: bytes }, [bytes.buffer]);
  },
  csv({ id, text }) {
    self.postMessage({ type: "answer", id, value: rescaled(parseCsv(text)) });
  },
  inspect({ id, bytes }) {
    self.postMessage({ type: "answer", id, value: summaryOf(fromSafetensors(bytes)) });
  },
};

function setup({ settings: given, points, opened, calm }) {
  settings = given;
  rest = calm ? 1000 : 90;
  const models = opened ? { [opened.side]: fromSafetensors(opened.bytes) } : {};
  learn(points || widened(datasets[settings.data](settings.points, settings)), models);
}

// Some of the paper's points lie on the edge of its pictures.
function widened(made) {
  const [x0, x1, y0, y1] = made.domain;
  const [across, up] = [0.04 * (x1 - x0), 0.04 * (y1 - y0)];
  return { ...made, domain: [x0 - across, x1 + across, y0 - up, y1 + up] };
}

// Train on these points, from these models on; networks that have none begin at random weights.
function learn(made, models) {
  const { train, test } = made.all ? { train: made, test: made } : halves(made);
  domain = made.domain;
  tested = first(test, MOST_TESTED);
  for (const side of SIDES) {
    const model = models[side] || null;
    trainers[side] = createTrainer({ ...settings, network: settings[side], data: train, model });
  }
  const promises = SIDES.map((side) => [side, guarantee(settings[side], settings.activation)]);
  self.postMessage({
    type: "ready",
    promises: Object.fromEntries(promises),
    shown: made.all ? made : first(train, MOST_SHOWN),
    domain,
    counts: [train.t.length, tested.t.length],
    heldOut: test !== train,
  });
  measuring = picture(running ? COARSE : FINE);
  plan();
}

function summaryOf({ net }) {
  const { network, layers, activation, features, h } = net;
  const found = { network, layers, activation, features };
  return hasStep(network) ? { ...found, T: h * layers } : found;
}

function halves({ x, t }) {
  const [train, test] = [0, 1].map((half) =>
    ({ x: x.filter((_, i) => (i >> 1) % 2 === half), t: t.filter((_, i) => i % 2 === half) }));
  return { train, test };
}

function first({ x, t }, count) {
  return { x: x.slice(0, 2 * count), t: t.slice(0, count) };
}

function plan() {
  if (planned) return;
  planned = true;
  setTimeout(work, 0);
}

function work() {
  planned = false;
  try {
    const begin = performance.now();
    while ((running || measuring) && performance.now() - begin < PIECE) {
      if (measuring) {
        if (measuring.next().done) measuring = null;
      } else if (performance.now() >= nextPicture) {
        measuring = picture(COARSE);
      } else {
        step();
      }
    }
  } catch (error) {
    running = false;
    measuring = null;
    self.postMessage({ type: "error", message: error.message });
  }
  if (running || measuring) plan();
}

function step() {
  for (const side of SIDES) trainers[side].step();
  counted.steps += 1;
}

// Everything that the page shows, a part at a time.
function* picture(cells) {
  let spent = 0;
  const found = { type: "picture", cells };
  for (const side of SIDES) {
    const trainer = trainers[side];
    const one = { loss: 0, right: 0 };
    for (let i = 0; i < tested.t.length; i += CHUNK) {
      const begin = performance.now();
      const t = tested.t.subarray(i, i + CHUNK);
      const { loss, accuracy } = trainer.evaluate(tested.x.subarray(2 * i, 2 * (i + CHUNK)), t);
      one.loss += (loss * t.length) / tested.t.length;
      one.right += accuracy * t.length;
      spent += performance.now() - begin;
      yield;
    }
    const grid = new Float32Array(cells * cells);
    const rows = Math.max(1, Math.floor(CHUNK / cells));
    for (let row = 0; row < cells; row += rows) {
      const begin = performance.now();
      const some = Math.min(rows, cells - row);
      grid.set(trainer.predict(centres(row, some, cells)), row * cells);
      spent += performance.now() - begin;
      yield;
    }
    const begin = performance.now();
    found[side] = {
      loss: one.loss,
      accuracy: Math.round(one.right) / tested.t.length,
      norms: trainer.norms(NORM_SAMPLES),
      grid,
    };
    spent += performance.now() - begin;
    yield;
  }
  const now = performance.now();
  found.step = before + trainers.left.stepCount;
  found.running = running;
  found.speed = (1000 * counted.steps) / Math.max(1, now - counted.since);
  if (now - counted.since > 2000) counted = { steps: 0, since: now };
  nextPicture = now + Math.max(rest, SHARE * spent);
  self.postMessage(found);
}

// The centres of some rows of cells, from the top of the picture on.
function centres(row, rows, cells) {
  const [x0, x1, y0, y1] = domain;
  const x = new Float64Array(2 * rows * cells);
  for (let i = 0; i < rows * cells; i++) {
    const down = row + Math.floor(i / cells);
    x[2 * i] = x0 + ((x1 - x0) * ((i % cells) + 0.5)) / cells;
    x[2 * i + 1] = y1 - ((y1 - y0) * (down + 0.5)) / cells;
  }
  return x;
}
