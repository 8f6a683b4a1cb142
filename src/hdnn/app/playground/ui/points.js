// Points that the visitor draws, and the few letters that hold them in a link.

export const DRAWN_DOMAIN = [-1.2, 1.2, -1.2, 1.2];
export const MOST_DRAWN = 600;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const CELLS = 2048; // along each side: eleven bits

export class Drawn {
  x = [];
  t = [];

  // False when there is no room for more.
  add(across, down, kind) {
    if (this.t.length >= MOST_DRAWN) return false;
    const [x0, x1, y0, y1] = DRAWN_DOMAIN;
    this.x.push(x0 + (x1 - x0) * fraction(across), y1 - (y1 - y0) * fraction(down));
    this.t.push(kind);
    return true;
  }

  undo() {
    this.x.splice(-2);
    this.t.pop();
  }

  clear() {
    this.x = [];
    this.t = [];
  }

  get both() {
    return this.t.includes(0) && this.t.includes(1);
  }

  points() {
    const [x, t] = [Float64Array.from(this.x), Uint8Array.from(this.t)];
    return { x, t, domain: DRAWN_DOMAIN, all: true };
  }
}

// The middle of a cell, so that a point comes out of a link just as it was drawn.
function fraction(place) {
  return (Math.min(CELLS - 1, Math.max(0, Math.floor(place * CELLS))) + 0.5) / CELLS;
}

// Four letters a point: the class, the column and the row, in 23 of their 24 bits.
export function packed({ x, t }) {
  const [x0, x1, y0, y1] = DRAWN_DOMAIN;
  let found = "";
  for (let i = 0; i < t.length; i++) {
    const column = Math.floor(((x[2 * i] - x0) / (x1 - x0)) * CELLS);
    const row = Math.floor(((y1 - x[2 * i + 1]) / (y1 - y0)) * CELLS);
    const bits = (t[i] * CELLS + column) * CELLS + row;
    for (const shift of [18, 12, 6, 0]) found += LETTERS[(bits >> shift) & 63];
  }
  return found;
}

// The points of a link, or null where they cannot be read.
export function unpacked(text) {
  if (text.length % 4 || text.length > 4 * MOST_DRAWN) return null;
  const drawn = new Drawn();
  for (let i = 0; i < text.length; i += 4) {
    const digits = [...text.slice(i, i + 4)].map((letter) => LETTERS.indexOf(letter));
    const bits = digits.reduce((value, digit) => value * 64 + digit, 0);
    if (digits.includes(-1) || bits >= 2 * CELLS * CELLS) return null;
    const column = Math.floor(bits / CELLS) % CELLS;
    drawn.add((column + 0.5) / CELLS, ((bits % CELLS) + 0.5) / CELLS, Math.floor(bits / CELLS / CELLS));
  }
  return drawn;
}
