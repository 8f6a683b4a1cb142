// All that is drawn and written, from the state alone.
import { forgetColours } from "./canvas.js";
import { drawCurve } from "./curves.js";
import { aboutNorms, drawNorms } from "./norms.js";
import { brief, normText, percent, whole } from "./numbers.js";
import { drawRegions } from "./regions.js";
import { BOTH, element, state, titleOf } from "./state.js";
import { scalingCode } from "./table.js";

const NOT_IN_PYTHON = ["orthogonal", "residual", "prenorm", "scaled", "rezero"];
const QUIET = 1500; // ms between two changes of the texts that stand for pictures
const SHALLOW = " With 8 layers and a rate of 0.01 it learns as well.";
let asked = false;
let described = 0;

// Draw before the next frame, however often this is called.
export function refresh() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    draw();
  });
}

export function recolour() {
  forgetColours();
  refresh();
}

export function say(sentence) {
  element("notice").textContent = sentence;
}

function draw() {
  const { picture, settings } = state;
  for (const side of BOTH) {
    const found = picture && picture[side];
    drawRegions(element(`${side}-regions`), {
      picture: found,
      cells: picture && picture.cells,
      shown: state.shown,
      domain: state.domain,
      cross: state.cross,
      hint: settings && settings.data === "drawn" && !state.drawn.t.length ? "Draw points here" : "",
    });
    writeFigures(side, found);
  }
  const sides = BOTH.map((name) => ({ name, norms: picture && picture[name].norms }));
  drawNorms(element("norms"), sides, state.layer);
  drawCurve(element("losses"), state.history, "loss", state.row);
  drawCurve(element("accuracies"), state.history, "accuracy", state.row);
  writeStatus();
  writeReadings();
  if (!state.running || performance.now() - described > QUIET) describe();
}

function writeFigures(side, found) {
  element(`${side}-accuracy`).textContent = found ? percent(found.accuracy) : "–";
  const reach = found ? found.norms.min[0] : NaN;
  element(`${side}-reach`).textContent = found ? `× ${normText(reach)}` : "–";
  const bar = element(`${side}-bar`);
  bar.firstElementChild.style.width = `${100 * Math.min(1, reach || 0)}%`;
  bar.setAttribute("aria-valuenow", Math.min(1, reach || 0).toFixed(3));
  const promise = state.promises[side];
  element(`${side}-theorem`).textContent = promise
    ? `${titleOf(side)}: ${promise.replace(">=", "≥")}. That is proved.`
    : `${titleOf(side)}: nothing is promised.${state.settings && state.settings[side] === "mlp" ? SHALLOW : ""}`;
  element(`${side}-name`).textContent = titleOf(side);
  element(`${side}-download`).hidden = NOT_IN_PYTHON.includes(state.settings && state.settings[side]);
  element(`key-${side}`).textContent = titleOf(side);
}

function writeStatus() {
  const { picture, counts, running, settings } = state;
  if (!settings) return;
  element("depth").textContent = `${settings.layers} layer${settings.layers === 1 ? "" : "s"}`;
  element("file-name").textContent = `${settings.left}-${settings.layers}.safetensors`;
  element("scaling").textContent = settings.data === "csv" ? scalingCode(state.units) : "";
  element("start").textContent = running ? "Pause" : "Start";
  const parts = [`Step ${whole(picture ? picture.step : 0)}`];
  if (running && picture && picture.speed > 0) parts.push(`${speedText(picture.speed)} steps a second`);
  else parts.push(running ? "starting" : "paused");
  if (counts[0]) {
    const rest = state.heldOut ? `, measured on ${whole(counts[1])} others` : "";
    parts.push(`${whole(counts[0])} points to learn${rest}`);
  }
  element("status").textContent = parts.join(" · ");
}

function speedText(speed) {
  return speed < 10 ? brief(speed, 2) : whole(Math.round(speed));
}

function writeReadings() {
  const { picture, cross, layer, row, history, domain, settings } = state;
  if (cross && picture) {
    const [x0, x1, y0, y1] = domain;
    const place = [x0 + (x1 - x0) * cross[0], y1 - (y1 - y0) * cross[1]];
    const { shift, scale } = settings.data === "csv" ? state.units : { shift: [0, 0], scale: [1, 1] };
    const at = `(${place.map((value, i) => brief(shift[i] + scale[i] * value)).join(", ")})`;
    const cell = cellAt(picture.cells, cross);
    const said = BOTH.map((side) => `${titleOf(side)} ${percent(picture[side].grid[cell])}`);
    element("regions-read").textContent = `At ${at}, class 1 has probability: ${said.join(", ")}`;
  } else {
    element("regions-read").textContent = "Point at a picture for its numbers; arrow keys do the same. Drag a point to move it.";
  }
  const norms = picture && layer !== null && layer < picture.left.norms.min.length;
  element("norms-read").textContent = norms
    ? `Layer ${layer}, smallest, median and largest: ${BOTH.map((side) => `${titleOf(side)} ${spread(picture[side].norms, layer)}`).join("; ")}`
    : "Point at the picture for the numbers of a layer.";
  const measured = row !== null && history.rows[row];
  for (const [id, key, show] of [["losses", "loss", brief], ["accuracies", "accuracy", percent]]) {
    element(`${id}-read`).textContent = measured
      ? `Step ${whole(measured.step)}: ${BOTH.map((side) => `${titleOf(side)} ${show(measured[side][key])}`).join(", ")}`
      : "\u00a0";
  }
}

function spread(norms, j) {
  return `${normText(norms.min[j])}, ${normText(norms.median[j])}, ${normText(norms.max[j])}`;
}

function cellAt(cells, [across, down]) {
  const inside = (place) => Math.min(cells - 1, Math.floor(place * cells));
  return inside(down) * cells + inside(across);
}

// The texts that stand for the pictures, with their figures.
function describe() {
  described = performance.now();
  const { picture, settings } = state;
  if (!settings) return;
  for (const side of BOTH) {
    const found = picture && picture[side];
    const title = titleOf(side);
    const figures = found ? `accuracy ${percent(found.accuracy)}, loss ${brief(found.loss)}` : "not trained yet";
    element(`${side}-regions`).setAttribute("aria-label", `Decision regions of ${title} with ${settings.layers} layers: ${figures}.`);
  }
  const about = BOTH.map((side) => aboutNorms(titleOf(side), picture && picture[side].norms));
  element("norms").setAttribute("aria-label", `Norms of dy_N/dy_j against the layer j, with a line at 1. ${about.join(" ")}`);
  const last = state.history.rows[state.history.rows.length - 1];
  for (const [id, key, name, show] of [["losses", "loss", "Loss", brief], ["accuracies", "accuracy", "Accuracy", percent]]) {
    const now = last ? BOTH.map((side) => `${titleOf(side)} ${show(last[side][key])}`).join(", ") : "nothing measured yet";
    element(id).setAttribute("aria-label", `${name} over the steps: ${now}.`);
  }
}
