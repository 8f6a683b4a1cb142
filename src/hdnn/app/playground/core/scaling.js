/** Points of the user's own, brought to a size that layers can work with. */

const LARGEST_POINT = 6; // coordinates up to this are fine: the double circles reach 4.3
const NARROWEST = 0.25; // standard deviations below this are not

/**
 * The same data, with {shift, scale}: x is (x - shift) / scale of each coordinate, by its mean and
 * standard deviation. Data of a usual size stay as they are, with shift 0 and scale 1, because a
 * model that is saved knows its inputs as it was trained on them.
 */
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
