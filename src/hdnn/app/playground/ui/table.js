// The rows of a CSV file as points to learn.
import { createRandom } from "../core/random.js";

const FEW_ROWS = 40; // below, all of them are learnt from

// In a fixed random order: rows are often sorted, and the same file should give the same training.
export function tablePoints({ x, t, domain }) {
  const order = createRandom(12345).shuffle(Array.from(t, (_, i) => i));
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
