// Decision regions: what a network says of every point of the plane, and the points themselves.
import { blended, colours, prepared, rgb, stroke, text } from "./canvas.js";

export function drawRegions(canvas, { picture, cells, shown, domain, cross, hint }) {
  const { context, width, height } = prepared(canvas);
  const c = colours();
  context.fillStyle = c.paper;
  context.fillRect(0, 0, width, height);
  if (picture) {
    context.imageSmoothingEnabled = true;
    context.drawImage(shaded(picture.grid, cells), 0, 0, width, height);
  }
  if (shown) drawPoints(context, shown, domain, width, height);
  if (hint) text(context, hint, width / 2, height / 2, { align: "center" });
  if (cross) {
    const [x, y] = [cross[0] * width, cross[1] * height];
    stroke(context, [[x, 0], [x, height]], c.ink, { width: 1 });
    stroke(context, [[0, y], [width, y]], c.ink, { width: 1 });
  }
}

// One pixel a cell; the canvas makes it smooth when it is enlarged.
function shaded(grid, cells) {
  const c = colours();
  const [paper, zero, one] = [rgb(c.paper), rgb(c.zero), rgb(c.one)];
  const small = new OffscreenCanvas(cells, cells);
  const context = small.getContext("2d");
  const image = context.createImageData(cells, cells);
  for (let i = 0; i < grid.length; i++) {
    const sure = Math.abs(2 * grid[i] - 1);
    const colour = blended(paper, grid[i] < 0.5 ? zero : one, Number.isFinite(sure) ? 0.12 + 0.4 * sure : 0);
    image.data.set([...colour, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return small;
}

function drawPoints(context, { x, t }, [x0, x1, y0, y1], width, height) {
  const c = colours();
  const count = t.length;
  const size = (count > 300 ? 2.5 : count > 100 ? 3 : 4) * (width < 360 ? 0.85 : 1);
  context.lineWidth = 0.8;
  context.strokeStyle = c.paper;
  for (let i = 0; i < count; i++) {
    const px = ((x[2 * i] - x0) / (x1 - x0)) * width;
    const py = ((y1 - x[2 * i + 1]) / (y1 - y0)) * height;
    context.fillStyle = t[i] ? c.one : c.zero;
    context.beginPath();
    if (t[i]) {
      const r = size * 1.25;
      for (const [a, b] of [[0, -r], [r, 0], [0, r], [-r, 0]]) context.lineTo(px + a, py + b);
      context.closePath();
    } else {
      context.arc(px, py, size, 0, 2 * Math.PI);
    }
    context.fill();
    context.stroke();
  }
}
