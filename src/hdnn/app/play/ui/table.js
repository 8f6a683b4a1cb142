// The rows of a CSV file as points to learn: shuffled, scaled, and not too many.

const MOST_ROWS = 10000;
const FEW_ROWS = 40; // below, all of them are learnt from

export function tablePoints({ x, t }) {
  const order = shuffled(t.length).slice(0, MOST_ROWS);
  const scales = [0, 1].map((column) => scaleOf(x, column));
  const points = { x: new Float64Array(2 * order.length), t: new Uint8Array(order.length) };
  order.forEach((from, to) => {
    points.t[to] = t[from];
    scales.forEach(({ mean, deviation }, column) => {
      points.x[2 * to + column] = (x[2 * from + column] - mean) / deviation;
    });
  });
  return { ...points, domain: [...bounds(points.x, 0), ...bounds(points.x, 1)], all: order.length < FEW_ROWS, scales };
}

// A fixed order: the same file gives the same training.
function shuffled(count) {
  const order = Array.from({ length: count }, (_, i) => i);
  let random = 12345;
  for (let i = count - 1; i > 0; i--) {
    random = (Math.imul(random, 1664525) + 1013904223) >>> 0;
    const other = Math.floor((random / 2 ** 32) * (i + 1));
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order;
}

function scaleOf(x, column) {
  const count = x.length / 2;
  let mean = 0;
  for (let i = 0; i < count; i++) mean += x[2 * i + column] / count;
  let variance = 0;
  for (let i = 0; i < count; i++) variance += (x[2 * i + column] - mean) ** 2 / count;
  return { mean, deviation: Math.sqrt(variance) || 1 };
}

function bounds(x, column) {
  let [low, high] = [Infinity, -Infinity];
  for (let i = column; i < x.length; i += 2) {
    low = Math.min(low, x[i]);
    high = Math.max(high, x[i]);
  }
  const room = 0.12 * (high - low) || 1;
  return [low - room, high + room];
}
