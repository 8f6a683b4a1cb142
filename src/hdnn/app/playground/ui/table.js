// The rows of a CSV file as points to learn.

const FEW_ROWS = 40; // below, all of them are learnt from

// In a fixed random order: rows are often sorted, and the same file should give the same training.
export function tablePoints({ x, t, domain }) {
  const order = shuffled(t.length);
  return {
    x: Float64Array.from({ length: x.length }, (_, i) => x[2 * order[i >> 1] + (i & 1)]),
    t: Uint8Array.from(order, (from) => t[from]),
    domain,
    all: t.length < FEW_ROWS,
  };
}

// What Python does to the columns before the network sees them; nothing where they are as they were.
export function scalingCode({ shift, scale }) {
  if (scale.every((width) => width === 1)) return "";
  return `x = (x - torch.tensor([${shift.join(", ")}])) / torch.tensor([${scale.join(", ")}])\n`;
}

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
