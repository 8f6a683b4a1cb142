// The page: inputs, buttons, files and links, and the worker that they steer.
import { History } from "./curves.js";
import { Engine } from "./engine.js";
import { listenForDrops, opened, save } from "./files.js";
import { listenForHands } from "./hands.js";
import { whole } from "./numbers.js";
import { NOISE, faultIn, fromHash, readInputs, toHash, writeInputs } from "./settings.js";
import { BOTH, element, state, titleOf } from "./state.js";
import { scalingCode, tablePoints } from "./table.js";
import { recolour, refresh, say } from "./view.js";

const MUCH = 2e6; // layers times points from which on a browser has a lot to do
const PAUSE_AFTER_TYPING = 150; // ms
const OF_A_NETWORK = ["layers", "activation", "T", "features"];
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let typing = 0;

const engine = new Engine({
  ready({ shown, domain, counts, heldOut, promises }) {
    Object.assign(state, { shown, domain, counts, heldOut, promises });
    if (state.running) engine.tell("run");
    refresh();
  },
  picture(picture) {
    state.picture = picture;
    const { step } = picture;
    state.history.add({ step, left: figures(picture.left), right: figures(picture.right) });
    const wild = BOTH.find((side) => !Number.isFinite(picture[side].loss));
    if (wild && state.running) {
      pause();
      say(`The numbers of ${titleOf(wild)} are too large to go on; take a smaller rate or T, and reset.`);
    }
    refresh();
  },
  paused() {},
  stuck() {
    state.running = false;
    say("The computation did not stop in time and was ended; Start begins anew.");
    refresh();
  },
  error({ message }) {
    engine.end();
    state.running = false;
    say(message);
    refresh();
  },
});

function figures({ loss, accuracy }) {
  return { loss, accuracy };
}

// Take the settings as they are now, with new networks at step 0.
function restart(sentence = "") {
  clearTimeout(typing);
  let settings;
  try {
    settings = readInputs();
  } catch (error) {
    state.running = false;
    engine.pause();
    say(error.message);
    refresh();
    return false;
  }
  state.settings = settings;
  writeLink();
  dropOpenedIfOther(settings);
  Object.assign(state, { picture: null, history: new History(), layer: null, row: null });
  const points = pointsOf(settings);
  element("drawing").hidden = settings.data !== "drawn";
  document.body.classList.toggle("draws", settings.data === "drawn");
  for (const id of ["noise", "points"]) element(id).disabled = !(settings.data in NOISE);
  if (points === null) {
    engine.end();
    Object.assign(state, { running: false, shown: state.drawn.points(), domain: state.drawn.points().domain, counts: [0, 0] });
    say(sentence || "Draw points of both classes, then start.");
    refresh();
    return false;
  }
  say(sentence || aboutWork(settings, points));
  engine.begin({ settings, points, opened: state.opened, calm: calm.matches });
  refresh();
  return true;
}

// Points to learn that the worker does not make itself; null where there are too few.
function pointsOf({ data }) {
  if (data === "csv") return state.table;
  if (data !== "drawn") return undefined;
  return state.drawn.both ? state.drawn.points() : null;
}

function aboutWork(settings, points) {
  const much = settings.layers * (points ? points.t.length : settings.points) > MUCH;
  return much ? "This is a lot of work for a browser: pictures come less often, and Pause ends it at any time." : "";
}

function dropOpenedIfOther(settings) {
  const from = state.opened;
  if (!from) return;
  const same = OF_A_NETWORK.every((name) => settings[name] === from.settings[name]);
  if (!same || settings[from.side] !== from.settings[from.side]) state.opened = null;
}

function writeLink() {
  const hash = toHash(state.settings, state.drawn);
  try {
    history.replaceState(null, "", hash);
  } catch {
    location.hash = hash;
  }
  element("link").value = location.href.replace(/#.*/, "") + hash;
}

function start(sentence = "") {
  if (!engine.works && !restart()) return;
  say(sentence || aboutWork(state.settings, pointsOf(state.settings)));
  state.running = true;
  engine.tell("run");
  refresh();
}

function pause() {
  state.running = false;
  engine.pause();
  refresh();
}

element("start").addEventListener("click", () => (state.running ? pause() : start()));
element("reset").addEventListener("click", () => {
  state.running = false;
  restart();
});
for (const side of BOTH) {
  element(`${side}-download`).addEventListener("click", async () => {
    if (!engine.works) {
      say("There is no network to download yet; press Start first.");
      return;
    }
    try {
      const name = `${state.settings[side]}-${state.settings.layers}.safetensors`;
      save(await engine.ask("download", { side }), name);
      say(`${name} is ready for hdnn.load("${name}").`);
    } catch (error) {
      say(error.message);
    }
  });
}

element("settings").addEventListener("submit", (event) => event.preventDefault());
element("settings").addEventListener("input", ({ target }) => {
  if (target.id === "data") element("noise").value = String(NOISE[target.value] ?? element("noise").value);
  if (target.id === "rate" && engine.works) {
    changeRate();
    return;
  }
  if (target.tagName === "SELECT") restart();
  else later();
});
element("layers").addEventListener("input", () => {
  element("depth").textContent = `${element("layers").value} layers`;
  later();
});

function later() {
  clearTimeout(typing);
  typing = setTimeout(restart, PAUSE_AFTER_TYPING);
}

// A new rate is taken on the way.
function changeRate() {
  try {
    state.settings = readInputs();
    say("");
    engine.tell("rate", { rate: state.settings.rate });
    writeLink();
  } catch (error) {
    say(error.message);
  }
}

element("share").addEventListener("click", async () => {
  const link = element("link");
  const lost = state.settings.data === "csv" ? " It does not hold the rows of your file." : "";
  try {
    await navigator.clipboard.writeText(link.value);
    say(`The link is copied.${lost}`);
  } catch {
    link.focus();
    link.select();
    say(`Copy the link below.${lost}`);
  }
});

async function take(file) {
  say(`Reading ${file.name} ..`);
  try {
    const found = await opened(file);
    if (found.kind === "csv") takeTable(found);
    else takeNetwork(found);
  } catch (error) {
    say(error.message);
  }
}

function takeTable({ name, table }) {
  state.table = tablePoints(table);
  state.units = { shift: table.shift, scale: table.scale };
  const option = element("data").querySelector('[value="csv"]');
  option.disabled = false;
  option.textContent = name.slice(0, 40);
  element("data").value = "csv";
  const scaled = scalingCode(state.units) ? " The columns are scaled, as the Python code below shows." : "";
  const classes = table.labels.map((label, i) => `class ${i} is “${label.slice(0, 40)}”`);
  restart(`${name} has ${whole(table.t.length)} rows; ${classes.join(", ")}.${scaled}`);
}

function takeNetwork({ name, bytes, found }) {
  const { network, ...settings } = found;
  const fault = faultIn(settings);
  if (fault) throw new Error(`${name} does not fit this page: ${fault}`);
  const side = network === "mlp" ? "right" : "left";
  settings[side] = network;
  writeInputs(settings);
  state.opened = { bytes, side, settings };
  restart(`${name} is on the ${side}, as it was saved, and learns on.`);
}

element("file").addEventListener("change", ({ target }) => {
  if (target.files.length) take(target.files[0]);
  target.value = "";
});
listenForDrops(take);
listenForHands((moved) => {
  if (moved) {
    engine.tell("move", moved);
    return;
  }
  if (!engine.works || !state.drawn.both) {
    restart();
    return;
  }
  say("");
  engine.tell("data", { points: state.drawn.points() });
  writeLink();
});

function takeLink() {
  const { settings, drawn, fault } = fromHash(location.hash);
  if (drawn) state.drawn = drawn;
  if (settings.data in NOISE && settings.noise === undefined) settings.noise = NOISE[settings.data];
  writeInputs(settings);
  if (restart(fault)) start(fault);
}

addEventListener("hashchange", () => {
  if (location.hash !== toHash(state.settings, state.drawn)) takeLink();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
new ResizeObserver(refresh).observe(document.body);
takeLink();
