// What the page knows at this moment. Only `main` and its helpers change it.
import { History } from "./curves.js";
import { Drawn } from "./points.js";

export const BOTH = ["left", "right"];

export const state = {
  settings: null,
  running: false,
  picture: null, // the last that came from the worker
  shown: null, // points
  domain: [-1.2, 1.2, -1.2, 1.2],
  counts: [0, 0],
  heldOut: true,
  promises: { left: null, right: null },
  history: new History(),
  drawn: new Drawn(),
  table: null, // of a CSV file
  units: { shift: [0, 0], scale: [1, 1] }, // how its columns were scaled
  opened: null, // a network from a file: its bytes, its side and what it needs of the settings
  cross: null, // where the pointer or the keyboard is, as fractions of a picture
  layer: null,
  row: null,
};

export function element(id) {
  return document.getElementById(id);
}

export function titleOf(side) {
  const select = element(side);
  return select.options[select.selectedIndex].text;
}
