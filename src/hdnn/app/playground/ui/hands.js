// Pointer, touch and keyboard in the pictures: reading numbers off them, and drawing points.
import { rowAt } from "./curves.js";
import { layerAt } from "./norms.js";
import { MOST_DRAWN } from "./points.js";
import { BOTH, element, state } from "./state.js";
import { refresh, say } from "./view.js";

const NEAR = 7; // pixels around a point in which it can be picked up
const APART = 0.022; // how far the points of a stroke are from each other, as a part of the picture

export function listenForHands(drawn) {
  for (const side of BOTH) listenToRegions(element(`${side}-regions`), drawn);
  listenToPicture(
    element("norms"),
    (canvas, px) => (state.layer = state.picture ? layerAt(canvas, px, state.settings.layers) : null),
    (by) => (state.layer = moved(state.layer, by, state.settings.layers)),
    () => (state.layer = null),
  );
  for (const id of ["losses", "accuracies"]) {
    listenToPicture(
      element(id),
      (canvas, px) => (state.row = rowAt(canvas, px, state.history.rows)),
      (by) => (state.row = moved(state.row, by, state.history.rows.length)),
      () => (state.row = null),
    );
  }
  for (const name of ["undo", "clear"]) {
    element(name).addEventListener("click", () => {
      state.drawn[name]();
      drawn();
    });
  }
}

function listenToPicture(canvas, point, move, leave) {
  const done = (change) => {
    change();
    refresh();
  };
  canvas.addEventListener("pointermove", (event) => done(() => point(canvas, event.offsetX)));
  canvas.addEventListener("pointerdown", (event) => done(() => point(canvas, event.offsetX)));
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || done(leave));
  canvas.addEventListener("blur", () => done(leave));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -8, PageDown: 8, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    done(() => move(by));
  });
}

function moved(place, by, count) {
  if (!count) return null;
  return Math.max(0, Math.min(count - 1, (place === null ? (by > 0 ? -1 : count) : place) + by));
}

function listenToRegions(canvas, drawn) {
  let last = null;
  let dragged = null; // the index of a point
  const place = (event) => [event.offsetX / canvas.clientWidth, event.offsetY / canvas.clientHeight];
  const draws = () => state.settings && state.settings.data === "drawn";
  canvas.addEventListener("pointerdown", (event) => {
    dragged = pointAt(event.offsetX, event.offsetY, canvas);
    if (dragged === null && !draws()) return;
    canvas.setPointerCapture(event.pointerId);
    if (dragged !== null) return;
    last = place(event);
    set(...last);
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    state.cross = last || dragged !== null ? null : at;
    if (dragged !== null) drag(dragged, at);
    if (last && Math.hypot(at[0] - last[0], at[1] - last[1]) >= APART) {
      last = at;
      set(...at);
    }
    refresh();
  });
  const end = () => {
    if (dragged !== null) drop(dragged, draws(), drawn);
    else if (last) drawn();
    last = dragged = null;
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  const leave = () => {
    state.cross = null;
    refresh();
  };
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by) {
      const [across, down] = state.cross || [0.5, 0.5];
      const size = event.shiftKey ? 0.1 : 0.025;
      const inside = (value) => Math.min(0.999, Math.max(0, value));
      state.cross = [inside(across + by[0] * size), inside(down + by[1] * size)];
    } else if (draws() && (event.key === "Enter" || event.key === " ")) {
      state.cross = state.cross || [0.5, 0.5];
      set(...state.cross);
      drawn();
    } else if (draws() && (event.key === "0" || event.key === "1")) {
      document.querySelector(`input[name="class"][value="${event.key}"]`).checked = true;
    } else if (draws() && event.key === "Backspace") {
      state.drawn.undo();
      drawn();
    } else {
      return;
    }
    event.preventDefault();
    refresh();
  });
}

// The index of the point under a pointer, or null.
function pointAt(px, py, canvas) {
  if (!state.shown) return null;
  const [x0, x1, y0, y1] = state.domain;
  let nearest = null;
  let closest = NEAR;
  for (let i = 0; i < state.shown.t.length; i++) {
    const across = ((state.shown.x[2 * i] - x0) / (x1 - x0)) * canvas.clientWidth - px;
    const down = ((y1 - state.shown.x[2 * i + 1]) / (y1 - y0)) * canvas.clientHeight - py;
    const away = Math.hypot(across, down);
    if (away < closest) [nearest, closest] = [i, away];
  }
  return nearest;
}

function drag(index, [across, down]) {
  const [x0, x1, y0, y1] = state.domain;
  const inside = (value) => Math.min(1, Math.max(0, value));
  state.shown.x.set([x0 + (x1 - x0) * inside(across), y1 - (y1 - y0) * inside(down)], 2 * index);
}

function drop(index, draws, drawn) {
  const place = state.shown.x.slice(2 * index, 2 * index + 2);
  if (draws) state.drawn.x.splice(2 * index, 2, ...place);
  drawn(draws ? null : { index, place });
}

function set(across, down) {
  if (across < 0 || across > 1 || down < 0 || down > 1) return;
  const kind = Number(document.querySelector('input[name="class"]:checked').value);
  if (!state.drawn.add(across, down, kind)) say(`There is room for ${MOST_DRAWN} points; take some away with Undo.`);
  state.shown = state.drawn.points();
  refresh();
}
