"""The paper's equations in sixty digits, on plain lists of numbers: slow, and right.

Nothing here uses the library. A vector is a list of mpf and a matrix a list of rows. Every
function takes one sample y and returns its states y_0, ..., y_N in that order, and every
derivative is a central difference, so that a layer is written once and nothing is derived.
Weights lead with the layer; h, J and X may be given once or for each layer.
"""

import mpmath
import numpy

mp = mpmath.mp.clone()
mp.dps = 60
STEP = mp.mpf(10) ** -15  # a central difference then errs by about 1e-30

SIGMA = {
    "tanh": mp.tanh,
    "relu": lambda x: max(x, mp.zero),
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
    "softplus": lambda x: mp.log(1 + mp.exp(x)),
    "gelu": lambda x: x * (1 + mp.erf(x / mp.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + mp.exp(-x)),
    "sin": mp.sin,
    "identity": lambda x: x,
}


def _softplus_integral(x):
    return -mp.re(mp.polylog(2, -mp.exp(x))) - mp.pi**2 / 12


INTEGRAL = {  # of sigma, from 0 to x
    "tanh": lambda x: mp.log(mp.cosh(x)),
    "relu": lambda x: max(x, mp.zero) ** 2 / 2,
    "sigmoid": lambda x: mp.log((1 + mp.exp(x)) / 2),
    "softplus": _softplus_integral,
    "gelu": lambda x: (x**2 * mp.ncdf(x) + x * mp.npdf(x) - mp.ncdf(x)) / 2 + mp.mpf(1) / 4,
    "silu": lambda x: x * mp.log(1 + mp.exp(x)) - _softplus_integral(x),
    "sin": lambda x: 1 - mp.cos(x),
    "identity": lambda x: x**2 / 2,
}


def derivative(function, x):
    return (function(x + STEP) - function(x - STEP)) / (2 * STEP)


def slope(activation, x):
    """sigma'(x)."""
    return derivative(SIGMA[activation], x)


STEEPEST = {  # where sigma'' = 0; sigma'(-x) = 1 - sigma'(x) puts the least slope at -x
    "gelu": mp.sqrt(2),
    "silu": mp.findroot(lambda x: x * mp.tanh(x / 2) - 2, 2),
}


def slope_range(activation):
    """The infimum and the supremum of sigma' over the real line."""
    if activation in STEEPEST:
        x = STEEPEST[activation]
        return slope(activation, -x), slope(activation, x)
    ends = {"sigmoid": (0, 0.25), "sin": (-1, 1), "identity": (1, 1)}
    return tuple(map(mp.mpf, ends.get(activation, (0, 1))))


# Vectors and matrices -----------------------------------------------------------------------


def exact(nested):
    """Floats to mpf, digit for digit, through nested lists."""
    return [exact(item) for item in nested] if isinstance(nested, list) else mp.mpf(nested)


def transpose(A):
    return [list(column) for column in zip(*A, strict=True)]


def times(A, x):
    return [mp.fdot(row, x) for row in A]


def plus(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


def scaled(c, x):
    return [c * a for a in x]


def eye(size):
    return [[mp.mpf(i == k) for k in range(size)] for i in range(size)]


def interconnection(X):
    """J = [[0, -X^T], [X, 0]], eq:implicit_euler_JKb."""
    zeros = [mp.zero] * len(X)
    return [zeros + scaled(-1, row) for row in transpose(X)] + [row + zeros for row in X]


_solved = {}  # the last root and Newton matrix for guesses that are as good as the same


def solve(residual, guess):
    """The root of `residual` near `guess`, by Newton's method.

    The Jacobian is inverted in double precision and kept near the root, since an error in it
    costs a few more steps and no digits. A difference asks for a root that is hardly elsewhere
    than the one before: it starts there, if what is left over is small.
    """
    place = tuple(round(float(a), 9) for a in guess)
    x, newton = _solved.get(place, (guess, None))
    r = residual(x)
    if max(map(abs, r)) > 1e-9:
        x, newton = guess, None
        r = residual(x)
    step = mp.mpf(10) ** -25
    for _ in range(60):
        if newton is None:
            columns = []
            for i in range(len(x)):
                moved = residual([*x[:i], x[i] + step, *x[i + 1 :]])
                columns.append([float((a - b) / step) for a, b in zip(moved, r, strict=True)])
            newton = exact(numpy.linalg.inv(numpy.array(columns).T).tolist())
        change = scaled(-1, times(newton, r))
        x = plus(x, change)
        size = max(map(abs, change))
        if size < mp.mpf(10) ** -54:  # and the next is 1e-4 times that, or less
            _solved[place] = x, newton
            return x
        if size > 1e-4:
            newton = None
        r = residual(x)
    raise ArithmeticError("Newton's method did not converge")


# Layers -------------------------------------------------------------------------------------


def halves(y):
    return y[: len(y) // 2], y[len(y) // 2 :]


def at(value, j, axes):
    """The value of layer j of something with `axes` axes that may be given once for all layers."""
    depth, inner = 0, value
    while isinstance(inner, list):
        depth, inner = depth + 1, inner[0]
    return value[j] if depth > axes else value


def sigma(activation, x):
    return list(map(SIGMA[activation], x))


def grad_H(K, b, y, activation):
    """K^T sigma(K y + b), eq:partialH."""
    return times(transpose(K), sigma(activation, plus(times(K, y), b)))


def states(y, N, layer):
    trajectory = [y]
    for j in range(N):
        trajectory.append(layer(j, trajectory[-1]))
    return trajectory


def h1(y, K, b, h, J=None, activation="tanh"):
    """y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j), eq:H-DNN_fE."""
    J = interconnection(eye(len(y) // 2)) if J is None else J

    def layer(j, y):
        return plus(y, scaled(at(h, j, 0), times(at(J, j, 2), grad_H(K[j], b[j], y, activation))))

    return states(y, len(K), layer)


def _p_update(p, q, K_q, b_q, h, X, activation):
    """p - h X^T K_q^T sigma(K_q q + b_q), eq:p_update."""
    return plus(p, scaled(-h, times(transpose(X), grad_H(K_q, b_q, q, activation))))


def _q_update(p, q, K_p, b_p, h, X, activation):
    """q + h X K_p^T sigma(K_p p + b_p), eq:q_update."""
    return plus(q, scaled(h, times(X, grad_H(K_p, b_p, p, activation))))


def h2(y, K_p, K_q, b_p, b_q, h, X=None, activation="tanh"):
    """p from q, then q from the new p: eq:p_update, eq:q_update."""
    X = eye(len(y) // 2) if X is None else X

    def layer(j, y):
        h_j, X_j = at(h, j, 0), at(X, j, 2)
        p, q = halves(y)
        p = _p_update(p, q, K_q[j], b_q[j], h_j, X_j, activation)
        q = _q_update(p, q, K_p[j], b_p[j], h_j, X_j, activation)
        return p + q

    return states(y, len(K_p), layer)


def h2_inverse(y, K_p, K_q, b_p, b_q, h, X=None, activation="tanh"):
    """The states that `h2` went through to end in y: its updates undone, last first."""
    X = eye(len(y) // 2) if X is None else X
    N = len(K_p)

    def layer(i, y):
        j = N - 1 - i
        h_j, X_j = at(h, j, 0), at(X, j, 2)
        p, q = halves(y)
        q = _q_update(p, q, K_p[j], b_p[j], -h_j, X_j, activation)
        p = _p_update(p, q, K_q[j], b_q[j], -h_j, X_j, activation)
        return p + q

    return states(y, N, layer)[::-1]


def implicit_h2(y, K, b, h, X=None, activation="tanh"):
    """y_{j+1} = y_j + h J K_j^T sigma(K_j (p_{j+1}, q_j) + b_j), eq:implicit_euler."""
    X = eye(len(y) // 2) if X is None else X

    def layer(j, y):
        J = interconnection(at(X, j, 2))
        _, q = halves(y)

        def step(p):
            return plus(y, scaled(at(h, j, 0), times(J, grad_H(K[j], b[j], p + q, activation))))

        def residual(p):
            return plus(p, scaled(-1, halves(step(p))[0]))

        return step(solve(residual, halves(y)[0]))

    return states(y, len(K), layer)


def ms1(y, K_0, b_1, b_2, h, activation="tanh"):
    """q' = q - h sigma(K_0^T p + b_1), then p' = p + h sigma(K_0 q' + b_2), eq:MS1."""

    def layer(j, y):
        h_j = at(h, j, 0)
        p, q = halves(y)
        q = plus(q, scaled(-h_j, sigma(activation, plus(times(transpose(K_0[j]), p), b_1[j]))))
        p = plus(p, scaled(h_j, sigma(activation, plus(times(K_0[j], q), b_2[j]))))
        return p + q

    return states(y, len(K_0), layer)


def ms2(y, K, b, h, activation="tanh"):
    """y_{j+1} = y_j + h sigma(K_j y_j + b_j), eq:MS2."""

    def layer(j, y):
        return plus(y, scaled(at(h, j, 0), sigma(activation, plus(times(K[j], y), b[j]))))

    return states(y, len(K), layer)


def ms3(y, K_1, K_2, b_1, b_2, h, activation="tanh"):
    """p' = p + h K_1^T sigma(K_1 q + b_1), then q' = q - h K_2^T sigma(K_2 p' + b_2), eq:MS3."""

    def layer(j, y):
        h_j = at(h, j, 0)
        p, q = halves(y)
        p = plus(p, scaled(h_j, grad_H(K_1[j], b_1[j], q, activation)))
        q = plus(q, scaled(-h_j, grad_H(K_2[j], b_2[j], p, activation)))
        return p + q

    return states(y, len(K_1), layer)


def _verlet_step(y, K_p, K_q, b_p, b_q, h, X, activation):
    """Half a step of p, a step of q, half a step of p."""
    p, q = halves(y)
    p = _p_update(p, q, K_q, b_q, h / 2, X, activation)
    q = _q_update(p, q, K_p, b_p, h, X, activation)
    p = _p_update(p, q, K_q, b_q, h / 2, X, activation)
    return p + q


def _composed(y, K_p, K_q, b_p, b_q, h, X, activation, parts):
    X = eye(len(y) // 2) if X is None else X

    def layer(j, y):
        for part in parts:
            step = part * at(h, j, 0)
            y = _verlet_step(y, K_p[j], K_q[j], b_p[j], b_q[j], step, at(X, j, 2), activation)
        return y

    return states(y, len(K_p), layer)


def verlet(y, K_p, K_q, b_p, b_q, h, X=None, activation="tanh"):
    """The Strang splitting of each layer's field."""
    return _composed(y, K_p, K_q, b_p, b_q, h, X, activation, [1])


def yoshida4(y, K_p, K_q, b_p, b_q, h, X=None, activation="tanh"):
    """Three Verlet steps of w_1 h, w_0 h, w_1 h with 2 w_1 + w_0 = 1 and 2 w_1^3 + w_0^3 = 0."""
    w_1 = 1 / (2 - mp.cbrt(2))
    return _composed(y, K_p, K_q, b_p, b_q, h, X, activation, [w_1, 1 - 2 * w_1, w_1])


def midpoint(y, K, b, h, J=None, activation="tanh"):
    """y_{j+1} = y_j + h J_j K_j^T sigma(K_j (y_j + y_{j+1}) / 2 + b_j)."""
    J = interconnection(eye(len(y) // 2)) if J is None else J

    def layer(j, y):
        def residual(new):
            middle = scaled(mp.mpf(1) / 2, plus(y, new))
            field = times(at(J, j, 2), grad_H(K[j], b[j], middle, activation))
            return plus(plus(new, scaled(-1, y)), scaled(-at(h, j, 0), field))

        return solve(residual, y)

    return states(y, len(K), layer)


def mlp(y, K, b, activation="tanh"):
    """y_{j+1} = sigma(K_j y_j + b_j)."""
    return states(y, len(K), lambda j, y: sigma(activation, plus(times(K[j], y), b[j])))


def energy(y, K, b, activation="tanh"):
    """H(y): the integral of sigma at K y + b, summed over its rows, eq:nlH."""
    return mp.fsum(map(INTEGRAL[activation], plus(times(K, y), b)))


# Derivatives --------------------------------------------------------------------------------


def slots(nested):
    """Where every number of nested lists is kept: the list that holds it and its place there."""
    for i, item in enumerate(nested):
        if isinstance(item, list):
            yield from slots(item)
        else:
            yield nested, i


def flat(nested):
    return [row[i] for row, i in slots(nested)]


def along(loss, nested, direction):
    """The derivative of loss(), which reads `nested`, along `direction` (as long as it is flat)."""
    places, centre = list(slots(nested)), flat(nested)
    values = []
    for sign in (1, -1):
        for (row, i), x, d in zip(places, centre, direction, strict=True):
            row[i] = x + sign * STEP * d
        values.append(loss())
    for (row, i), x in zip(places, centre, strict=True):
        row[i] = x
    return (values[0] - values[1]) / (2 * STEP)


def gradient(loss, nested):
    """The derivatives of loss() by every number of `nested`, which it reads, in order."""
    derivatives = []
    for row, i in slots(nested):
        x = row[i]
        row[i] = x + STEP
        above = loss()
        row[i] = x - STEP
        below = loss()
        row[i] = x
        derivatives.append((above - below) / (2 * STEP))
    return derivatives
