/** The spectral norm of small matrices, by one-sided rotations (Jacobi): exact up to rounding. */

/** The largest singular value of A (n, n), given row by row; A is overwritten. */
export function spectralNorm(A, n) {
  let size = 0;
  for (let i = 0; i < n * n; i++) {
    const a = Math.abs(A[i]);
    if (!(a <= size)) size = a; // NaN too
  }
  if (!(size > 0 && size < Infinity)) return size;
  // Scaled, so that squares neither overflow nor vanish: perceptrons come to norms of 1e-200.
  for (let i = 0; i < n * n; i++) A[i] /= size;
  for (let turn = 0, turned = true; turned && turn < 30; turn++) {
    turned = false;
    for (let p = 0; p < n - 1; p++) {
      for (let q = p + 1; q < n; q++) turned = orthogonalised(A, n, p, q) || turned;
    }
  }
  let most = 0;
  for (let r = 0; r < n; r++) most = Math.max(most, dot(A, n, r, r));
  return size * Math.sqrt(most);
}

/** Turn the rows p and q until they are orthogonal; false if they are already. */
function orthogonalised(A, n, p, q) {
  const a = dot(A, n, p, p);
  const b = dot(A, n, q, q);
  const c = dot(A, n, p, q);
  if (Math.abs(c) <= 1e-9 * Math.sqrt(a * b)) return false; // the norm is off by its square
  const slope = (b - a) / (2 * c);
  const tan = Math.sign(slope || 1) / (Math.abs(slope) + Math.sqrt(1 + slope * slope));
  const cos = 1 / Math.sqrt(1 + tan * tan);
  const sin = cos * tan;
  for (let i = 0; i < n; i++) {
    const x = A[p * n + i];
    const y = A[q * n + i];
    A[p * n + i] = cos * x - sin * y;
    A[q * n + i] = sin * x + cos * y;
  }
  return true;
}

function dot(A, n, p, q) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += A[p * n + i] * A[q * n + i];
  return sum;
}
