// The settings: read from the page's inputs and from a link, and written to both.
import { packed, unpacked } from "./points.js";

const NUMBERS = ["layers", "noise", "T", "rate", "points", "batch", "features", "seed"];
const WORDS = ["left", "right", "data", "activation", "optimiser"];
const WHOLE_NUMBERS = ["layers", "points", "batch", "features", "seed"];
// How much noise the sets of the paper have.
export const NOISE = { swiss_roll: 0, double_moons: 0.15, double_circles: 0.3 };

// The settings, or an Error with a sentence for the first input that cannot be used.
export function readInputs() {
  const found = {};
  let wrong = "";
  for (const name of [...WORDS, ...NUMBERS]) {
    const input = document.getElementById(name);
    const value = WORDS.includes(name) ? input.value : Number(input.value);
    const fault = WORDS.includes(name) ? "" : faultOf(name, input.value);
    input.toggleAttribute("aria-invalid", false);
    if (fault) input.setAttribute("aria-invalid", "true");
    wrong = wrong || fault;
    found[name] = value;
  }
  if (wrong) throw new Error(wrong);
  return found;
}

export function writeInputs(settings) {
  for (const [name, value] of Object.entries(settings)) {
    const input = document.getElementById(name);
    if (input && [...WORDS, ...NUMBERS].includes(name)) input.value = String(value);
  }
}

export function toHash(settings, drawn) {
  const pairs = [...WORDS, ...NUMBERS].map((name) => [name, settings[name]]);
  if (settings.data === "drawn" && drawn.t.length) pairs.push(["drawn", packed(drawn)]);
  return `#${new URLSearchParams(pairs)}`;
}

// What a link asks for, and a sentence on what of it cannot be used.
export function fromHash(hash) {
  const settings = {};
  let drawn = null;
  let fault = "";
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const input = document.getElementById(name);
    if (name === "drawn") {
      drawn = unpacked(value);
      if (!drawn) fault = "The points in this link cannot be read, so there are none.";
    } else if (NUMBERS.includes(name)) {
      const said = faultOf(name, value);
      if (said) fault = `This link cannot be used as it is: ${said}`;
      else settings[name] = Number(value);
    } else if (WORDS.includes(name)) {
      if (name === "data" && value === "csv") fault = "A link cannot hold a CSV file: drop the file here once more.";
      else if ([...input.options].some((option) => option.value === value)) settings[name] = value;
      else fault = `This link asks for ${labelOf(name)} “${value.slice(0, 40)}”, which is not known here.`;
    }
  }
  return { settings, drawn, fault };
}

// A sentence on the first of these numbers that the page does not offer.
export function faultIn(settings) {
  const given = Object.entries(settings).filter(([name]) => NUMBERS.includes(name));
  return given.map(([name, value]) => faultOf(name, String(value))).find(Boolean) || "";
}

function labelOf(name) {
  return document.querySelector(`label[for="${name}"]`).textContent;
}

function faultOf(name, said) {
  const input = document.getElementById(name);
  const value = Number(said);
  if (input.tagName === "SELECT") {
    const offered = [...input.options].map((option) => option.value);
    return offered.includes(said) ? "" : `${labelOf(name)} must be one of ${offered.join(", ")}.`;
  }
  const [low, high] = [Number(input.min), Number(input.max)];
  const whole = WHOLE_NUMBERS.includes(name);
  const fits = said.trim() !== "" && value >= low && value <= high && (!whole || Number.isInteger(value));
  return fits ? "" : `${labelOf(name)} must be a ${whole ? "whole " : ""}number from ${low} to ${high}.`;
}
