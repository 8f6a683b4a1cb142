// Loss and accuracy over the steps of training, of both networks.
import { colours, prepared, stroke, text } from "./canvas.js";
import { whole } from "./numbers.js";

const MARGIN_OF = { left: 46, right: 12, top: 10, bottom: 26 };
const DASHES = { left: [], right: [7, 5] };
const MOST_KEPT = 400;

// What was measured; every other row goes when it becomes too much to draw.
export class History {
  rows = [];

  add(row) {
    if (this.rows.at(-1)?.step === row.step) this.rows.pop();
    if (this.rows.length > MOST_KEPT) this.rows = this.rows.filter((_, i) => i % 2 === 0);
    this.rows.push(row);
  }
}

export function drawCurve(canvas, history, key, marked) {
  const { context, width, height } = prepared(canvas);
  const c = colours();
  const rows = history.rows;
  const inside = [MARGIN_OF.left, width - MARGIN_OF.right];
  const bottom = height - MARGIN_OF.bottom;
  const { low, high, marks, show } = key === "accuracy" ? accuracyScale(rows) : lossScale(rows);
  const steps = Math.max(1, rows.length ? rows[rows.length - 1].step : 1);
  const x = (step) => inside[0] + ((inside[1] - inside[0]) * step) / steps;
  const y = (value) => bottom - ((bottom - MARGIN_OF.top) * (Math.min(high, Math.max(low, value)) - low)) / (high - low);
  for (const mark of marks) {
    stroke(context, [[inside[0], y(mark)], [inside[1], y(mark)]], c.grid, { width: 1 });
    text(context, show(mark), inside[0] - 8, y(mark), { align: "right" });
  }
  text(context, "0", inside[0], bottom + 14);
  text(context, `step ${whole(steps)}`, inside[1], bottom + 14, { align: "right" });
  for (const side of ["right", "left"]) {
    const points = rows.filter((row) => Number.isFinite(row[side][key])).map((row) => [x(row.step), y(row[side][key])]);
    stroke(context, points, c[side], { width: 2.2, dash: DASHES[side] });
  }
  if (marked !== null && rows[marked]) {
    const at = x(rows[marked].step);
    stroke(context, [[at, MARGIN_OF.top], [at, bottom]], c.ink, { width: 1, dash: [2, 3] });
  }
}

// The measurement nearest to this place of the picture.
export function rowAt(canvas, px, rows) {
  if (!rows.length) return null;
  const inside = canvas.clientWidth - MARGIN_OF.left - MARGIN_OF.right;
  const step = ((px - MARGIN_OF.left) / inside) * rows[rows.length - 1].step;
  const away = rows.map((row) => Math.abs(row.step - step));
  return away.indexOf(Math.min(...away));
}

function values(rows, key) {
  return rows.flatMap((row) => [row.left[key], row.right[key]]).filter(Number.isFinite);
}

function accuracyScale(rows) {
  const low = Math.min(0.5, ...values(rows, "accuracy")) < 0.4 ? 0 : 0.4;
  const marks = low ? [0.4, 0.6, 0.8, 1] : [0, 0.25, 0.5, 0.75, 1];
  return { low, high: 1.01, marks, show: (mark) => `${Math.round(100 * mark)}%` };
}

function lossScale(rows) {
  const most = Math.min(3, Math.max(0.7, ...values(rows, "loss")));
  const every = most > 1.6 ? 1 : most > 0.9 ? 0.5 : 0.2;
  const marks = [];
  for (let mark = 0; mark <= most; mark += every) marks.push(Number(mark.toFixed(1)));
  return { low: 0, high: most * 1.05, marks, show: String };
}
