// norm(dy_N/dy_j) of every layer: bands over samples, and the line at 1.
import { colours, prepared, rgb, stroke, text } from "./canvas.js";
import { brief } from "./numbers.js";

const LOWEST = -10; // powers of ten that are drawn; what is smaller lies at the bottom
const HIGHEST = 12;
const MARGIN = { left: 52, right: 14, top: 12, bottom: 40 };
const DASH = { left: [], right: [7, 5] };

export function drawNorms(canvas, sides, marked) {
  const { context, width, height } = prepared(canvas);
  const c = colours();
  const found = sides.filter((side) => side.norms);
  const layers = found.length ? found[0].norms.min.length : 64;
  const { low, high } = powers(found);
  const x = (j) => MARGIN.left + ((width - MARGIN.left - MARGIN.right) * (j + 0.5)) / layers;
  const bottom = height - MARGIN.bottom;
  const y = (value) => {
    const power = Math.min(high, Math.max(low, value > 0 ? Math.log10(value) : low));
    return bottom - ((bottom - MARGIN.top) * (power - low)) / (high - low);
  };
  shadow(context, c, y(1), bottom, width);
  const every = Math.max(1, Math.ceil(((high - low) * 30) / (bottom - MARGIN.top)));
  for (let power = low; power <= high; power++) {
    if (power % every) continue;
    const at = y(10 ** power);
    if (power) stroke(context, [[MARGIN.left, at], [width - MARGIN.right, at]], c.grid, { width: 1 });
    text(context, power === 0 ? "1" : power === 1 ? "10" : `1e${power}`, MARGIN.left - 8, at, { align: "right" });
  }
  for (const { name, norms } of found) band(context, norms, x, y, c[name], DASH[name]);
  stroke(context, [[MARGIN.left, y(1)], [width - MARGIN.right, y(1)]], c.ink, { width: 1.5 });
  text(context, "1: below this line every gradient shrinks", MARGIN.left + 8, y(1) + 12, { colour: c.ink });
  for (const j of ticks(layers)) text(context, String(j), x(j), bottom + 14, { align: "center" });
  text(context, "layer j", (MARGIN.left + width) / 2, height - 9, { align: "center" });
  if (marked !== null && marked < layers) {
    stroke(context, [[x(marked), MARGIN.top], [x(marked), bottom]], c.ink, { width: 1, dash: [2, 3] });
  }
}

// The layer at this place of the picture.
export function layerAt(canvas, px, layers) {
  const inside = canvas.clientWidth - MARGIN.left - MARGIN.right;
  return Math.max(0, Math.min(layers - 1, Math.floor(((px - MARGIN.left) / inside) * layers)));
}

export function aboutNorms(title, norms) {
  if (!norms) return `${title}: nothing measured yet.`;
  return `${title}: norms of ${norms.min.length} layers, smallest ${brief(Math.min(...norms.min))}, largest ${brief(Math.max(...norms.max))}.`;
}

function powers(found) {
  let low = -3;
  let high = 1;
  for (const { norms } of found) {
    const [least, most] = [Math.min(...norms.min), Math.max(...norms.max)];
    if (!(least >= 1e-3)) low = least > 0 ? Math.min(low, Math.floor(Math.log10(least))) : LOWEST;
    if (most > 10) high = Math.max(high, Math.ceil(Math.log10(most)));
  }
  return { low: Math.max(LOWEST, low), high: Math.min(HIGHEST, high) };
}

function shadow(context, c, from, to, width) {
  const shade = context.createLinearGradient(0, from, 0, to);
  const [r, g, b] = rgb(c.dark);
  shade.addColorStop(0, `rgba(${r},${g},${b},0.03)`);
  shade.addColorStop(1, `rgba(${r},${g},${b},0.42)`);
  context.fillStyle = shade;
  context.fillRect(MARGIN.left, from, width - MARGIN.left - MARGIN.right, to - from);
}

function band(context, norms, x, y, colour, dash) {
  const layers = norms.min.length;
  const line = (values) => Array.from(values, (value, j) => [x(j), y(value)]);
  if (layers < 2) {
    stroke(context, [[x(0), y(norms.min[0])], [x(0), y(norms.max[0])]], colour, { width: 8 });
    return;
  }
  context.beginPath();
  for (const [px, py] of [...line(norms.max), ...line(norms.min).reverse()]) context.lineTo(px, py);
  context.closePath();
  context.globalAlpha = 0.28;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
  stroke(context, line(norms.min), colour, { width: 1, dash });
  stroke(context, line(norms.max), colour, { width: 1, dash });
  stroke(context, line(norms.median), colour, { width: 2.5, dash });
}

function ticks(layers) {
  const every = [1, 2, 4, 8, 16, 32, 64].find((step) => layers / step <= 9);
  return Array.from({ length: Math.ceil(layers / every) }, (_, i) => i * every);
}
