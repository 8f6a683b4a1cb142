"""Explicit symplectic schemes: p and q take turns.

With a block-diagonal K the Hamiltonian splits into H(p) + H(q), each of which can be solved
exactly: it only shears the other half. Any sequence of such shears is symplectic and is undone by
the same sequence backwards. The schemes differ in nothing but their fractions of the step h.
"""

from __future__ import annotations

from typing import Literal

from hdnn.errors import OptionError

Shear = tuple[Literal["p", "q"], float]
"""Which half moves, and by what fraction of h."""

SEMI_IMPLICIT_EULER: tuple[Shear, ...] = (("p", 1.0), ("q", 1.0))
"""Order 1: eq:p_update, then eq:q_update."""

VERLET: tuple[Shear, ...] = (("p", 0.5), ("q", 1.0), ("p", 0.5))
"""Order 2: kick, drift, kick (Strang, 1968)."""

_OUTER = 1 / (2 - 2 ** (1 / 3))
_INNER = 1 - 2 * _OUTER

YOSHIDA4: tuple[Shear, ...] = (
    ("p", _OUTER / 2),
    ("q", _OUTER),
    ("p", (_OUTER + _INNER) / 2),
    ("q", _INNER),
    ("p", (_INNER + _OUTER) / 2),
    ("q", _OUTER),
    ("p", _OUTER / 2),
)
"""Order 4: three Verlet steps, the middle one backwards in time (Yoshida, 1990)."""

MS3: tuple[Shear, ...] = (("p", -1.0), ("q", -1.0))
"""Semi-implicit Euler with both signs changed (eq:MS3)."""

MS1: tuple[Shear, ...] = (("q", -1.0), ("p", -1.0))
"""q first, with both signs changed (eq:MS1)."""

WEIGHTS = {"K_p": "N r_p m", "K_q": "N r_q m", "b_p": "N r_p", "b_q": "N r_q"}
NAMES = {
    SEMI_IMPLICIT_EULER: ("h2", WEIGHTS),
    VERLET: ("verlet", WEIGHTS),
    YOSHIDA4: ("yoshida4", WEIGHTS),
    MS3: ("ms3", {"K_2": "N r_p m", "K_1": "N r_q m", "b_2": "N r_p", "b_1": "N r_q"}),
}
"""What users call each scheme and its weights, with their shapes."""


def named(shears: tuple[Shear, ...]) -> tuple[str, dict[str, str]]:
    """What users call a sequence and its weights, with their shapes; an error if it is none."""
    try:
        known = NAMES.get(shears)
    except TypeError:  # a list has no hash
        known = None
    if known is not None:
        return known
    fine = isinstance(shears, tuple) and all(
        isinstance(one, tuple) and len(one) == 2 and one[0] in ("p", "q") for one in shears
    )
    if not fine or not shears:
        raise OptionError(
            "shears must be a tuple of pairs, each of the half that moves and its fraction of h, "
            f"such as (('p', 1.0), ('q', 1.0)), but got {shears!r}."
        )
    return "split", WEIGHTS


def inverse(shears: tuple[Shear, ...]) -> tuple[Shear, ...]:
    """The sequence that undoes `shears`."""
    return tuple((half, -fraction) for half, fraction in reversed(shears))
