// Canvases that are sharp on every screen, and colours that follow the scheme.

const COLOURS = ["left", "right", "zero", "one", "paper", "dark", "ink", "soft", "grid", "edge", "card"];
let known = null;

export function colours() {
  if (!known) {
    const style = getComputedStyle(document.documentElement);
    known = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return known;
}

export function forgetColours() {
  known = null;
}

// The context of a canvas, cleared, in units of CSS pixels; and its width and height.
export function prepared(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const wide = Math.round(width * ratio);
  const high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "13px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  return { context, width, height };
}

export function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

export function blended(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

// A line of points, drawn as it is or in dashes.
export function stroke(context, points, colour, { width = 2, dash = [] } = {}) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
}

export function text(context, said, x, y, { colour = colours().soft, align = "left" } = {}) {
  context.fillStyle = colour;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(said, x, y);
}
