/** Points of the user's own, from a text with the columns x, y and class. */

export const MOST_ROWS = 10_000;
const MOST_LETTERS = 4_000_000;

/** Points x, classes t, names of columns, labels of classes, and the domain of a picture. */
export function parseCsv(text) {
  if (text.length > MOST_LETTERS) {
    throw new Error(`The file is too long: at most ${MOST_ROWS} rows can be shown.`);
  }
  const lines = text.replace(/^\uFEFF/, "").split(/\r\n|\n|\r/);
  const rows = [];
  lines.forEach((line, index) => {
    if (line.trim()) rows.push({ number: index + 1, line });
  });
  if (!rows.length) throw new Error("The file is empty; it needs rows of x, y and class.");
  const mark = separator(rows[0].line);
  const first = cells(rows[0], mark);
  const named = !(isNumber(first[0]) || isNumber(first[1]));
  const names = named ? first : ["x", "y", "class"];
  if (named) rows.shift();
  if (!rows.length || rows.length > MOST_ROWS) {
    throw new Error(`The file has ${rows.length} rows below its header, but 1 to ${MOST_ROWS} are needed.`);
  }
  const x = new Float64Array(2 * rows.length);
  const classes = rows.map((row, i) => {
    const cell = cells(row, mark);
    for (const c of [0, 1]) {
      if (!isNumber(cell[c])) {
        throw new Error(`In line ${row.number}, ${names[c]} must be a number, ` +
          `but it is ${shown(cell[c])}.`);
      }
      x[2 * i + c] = Number(cell[c]);
    }
    if (!cell[2]) throw new Error(`In line ${row.number} the class is missing.`);
    return cell[2];
  });
  const labels = twoOf(classes);
  const t = Uint8Array.from(classes, (label) => (label === labels[1] ? 1 : 0));
  return { x, t, names, labels, domain: around(x) };
}

/** The first of tab, semicolon and comma that makes three cells of a line. */
function separator(line) {
  return ["\t", ";", ","].find((mark) => line.split(mark).length === 3) ?? ",";
}

function cells({ number, line }, mark) {
  const values = line.split(mark).map((cell) => cell.trim().replace(/^"(.*)"$/, "$1").trim());
  if (values.length === 3) return values;
  throw new Error(`Line ${number} has ${values.length} of the columns x, y and class.`);
}

function isNumber(text) {
  // Beyond this no picture has a use for it, and squares would overflow.
  return /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(text) && Math.abs(Number(text)) <= 1e100;
}

function shown(cell) {
  if (!cell) return "missing";
  return cell.length > 20 ? `${cell.slice(0, 20)}…` : cell;
}

function twoOf(classes) {
  const labels = [...new Set(classes)];
  if (labels.length !== 2) {
    throw new Error(`The file has ${labels.length} ${labels.length === 1 ? "class" : "classes"}, but two are needed.`);
  }
  const numbers = labels.every(isNumber);
  return labels.sort((a, b) => (numbers ? Number(a) - Number(b) : a < b ? -1 : 1));
}

/** The smallest box around all points, and a tenth of it more on each side. */
function around(x) {
  const domain = [];
  for (const c of [0, 1]) {
    let low = Infinity;
    let high = -Infinity;
    for (let i = c; i < x.length; i += 2) {
      low = Math.min(low, x[i]);
      high = Math.max(high, x[i]);
    }
    const margin = high > low ? 0.1 * (high - low) : 0.1 * Math.abs(low) || 1;
    domain.push(low - margin, high + margin);
  }
  return domain;
}

const LARGEST_POINT = 6; // coordinates up to this are fine: the double circles reach 4.3
const NARROWEST = 0.25; // standard deviations below this are not

/** Data as (x - shift) / scale of each coordinate; those of a usual size stay as they are. */
export function rescaled(data) {
  const { x } = data;
  const count = x.length / 2;
  const mean = [0, 0];
  const deviation = [0, 0];
  let largest = 0;
  for (let i = 0; i < x.length; i++) {
    mean[i % 2] += x[i] / count;
    largest = Math.max(largest, Math.abs(x[i]));
  }
  for (let i = 0; i < x.length; i++) deviation[i % 2] += (x[i] - mean[i % 2]) ** 2 / count;
  const widths = deviation.map((square) => Math.sqrt(square));
  if (largest <= LARGEST_POINT && Math.max(...widths) >= NARROWEST) {
    return { ...data, shift: [0, 0], scale: [1, 1] };
  }
  const scale = widths.map((width) => width || 1); // a coordinate that is constant stays so
  const moved = (value, k) => (value - mean[k]) / scale[k];
  const domain = data.domain?.map((value, k) => moved(value, k >> 1));
  return { ...data, x: x.map((value, i) => moved(value, i % 2)), domain, shift: mean, scale };
}
