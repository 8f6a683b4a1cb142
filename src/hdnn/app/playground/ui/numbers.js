// Numbers and sentences as the page shows them.

export const whole = new Intl.NumberFormat("en").format;

// A small part of the whole is never rounded to all of it.
export function percent(value) {
  if (!Number.isFinite(value)) return "–";
  const shown = (100 * value).toFixed(1);
  return `${value < 1 && shown === "100.0" ? "99.9" : shown}%`;
}

export function brief(value, digits = 3) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// Nothing below 1 is shown as 1, but for the rounding of the arithmetic itself.
export function normText(value) {
  if (value < 1 - 1e-12 && Number(value.toPrecision(3)) >= 1) return "0.999";
  return value >= 0.1 && value < 1000 ? value.toPrecision(3) : brief(value);
}
