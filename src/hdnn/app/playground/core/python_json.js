/** JSON as Python's json.dumps(.., sort_keys=True) writes it: checksums are of that very text. */

/** A number that is a float in Python, also where it is whole. */
export class PythonFloat {
  constructor(value) {
    this.value = value;
  }
}

export function pythonJson(value) {
  if (value instanceof PythonFloat) return floatText(value.value);
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const entry = (key) => `${JSON.stringify(key)}: ${pythonJson(value[key])}`;
    return `{${Object.keys(value).sort().map(entry).join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** repr of a positive float: both languages find the same digits, but write exponents otherwise. */
function floatText(x) {
  if (x >= 1e16 || x < 1e-4) return x.toExponential().replace(/e([-+])(\d)$/, "e$10$2");
  return Number.isInteger(x) ? `${x}.0` : String(x);
}
