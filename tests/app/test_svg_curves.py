"""Where the lines and marks of a curve lie."""

from __future__ import annotations

import pytest

from hdnn.app.svg_charts import histogram, with_diagonal
from hdnn.app.svg_curves import Line, curve, log_marks, marks


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [1.0, 1.0],
        [0.0, 0.0],
        [-1.0, 2.0],
        [1e-300, 1e300],
        [1.0, None, 0.0, 5.0],
        [0.04, 0.0, 0.0],
        [0.3, 0.8],
    ],
)
def test_curves_stay_inside_of_their_frame(values):
    drawn = curve([Line("y", list(range(len(values))), values, "#000")], "x")
    assert drawn is not None
    for x, y in points(drawn):
        assert drawn.left <= x <= drawn.right
        assert drawn.top <= y <= drawn.bottom


def points(drawn):
    """Where the points of the first line lie."""
    _, pieces = drawn.lines[0]
    return [point for piece in pieces for point in piece]


def test_without_a_value_there_is_no_curve():
    assert curve([Line("y", [1, 2], [None, None], "#000")], "x") is None


def test_zeros_are_at_the_lower_edge_of_a_logarithmic_curve():
    drawn = curve([Line("y", [1, 2, 3, 4], [10.0, 0.0, 0.1, 0.0], "#000")], "x")
    first, second, third, last = (y for _, y in points(drawn))
    assert second == last == drawn.bottom
    assert first < third < second


def test_rounding_is_not_drawn_as_if_it_were_a_curve():
    drawn = curve([Line("y", [1, 2, 3], [1.0, 1 + 1e-12, 1 + 2e-12], "#000")], "x", level=1.0)
    assert {y for _, y in points(drawn)} == {drawn.level}
    texts = [text for _, text in drawn.marks]
    assert len(set(texts)) == len(texts) > 1


@pytest.mark.parametrize(("low", "high"), [(0.1, 7.0), (3.0, 3.1), (1e-12, 1.0), (1.0, 1e300)])
def test_marks_are_few_and_inside(low, high):
    for found in (marks(low, high), log_marks(low, high)):
        assert 1 <= len(found) <= 9
        assert found == sorted(found)


def test_a_linear_curve_begins_at_zero():
    drawn = curve([Line("y", [1, 2], [0.2, 0.4], "#000")], "x", linear=True, upright=2)
    assert drawn.marks[0][1] == "0"
    assert drawn.upright == drawn.right


# Charts


def test_points_on_the_diagonal_are_drawn_on_it():
    drawn = with_diagonal([(1.0, 1.0), (3.0, 3.0), (2.0, 5.0)], ("x", "y"), "title")
    x1, y1, x2, y2 = drawn.diagonal
    for x, y in drawn.dots[:2]:
        assert (y - y1) * (x2 - x1) == pytest.approx((x - x1) * (y2 - y1), abs=60)
    assert with_diagonal([], ("x", "y"), "title") is None


@pytest.mark.parametrize("value", [0.0, 1e300, -5.0, 1e-300])
def test_a_single_point_is_inside_of_its_frame(value):
    drawn = with_diagonal([(value, value)], ("x", "y"), "title")
    ((x, y),) = drawn.dots
    assert drawn.left <= x <= drawn.right
    assert drawn.top <= y <= drawn.bottom


@pytest.mark.parametrize(
    ("edges", "counts"), [([0, 1, 2], [3, 1]), ([-1, 0.5], [100]), ([2, 2], [7]), ([0, 0], [1])]
)
def test_bars_are_inside_of_their_frame(edges, counts):
    drawn = histogram(edges, counts, ("x", "rows"), "title")
    for x, y, width, height in drawn.bars:
        assert drawn.left <= x
        assert x + width <= drawn.right + 0.2
        assert drawn.top <= y
        assert y + height == pytest.approx(drawn.bottom)


@pytest.mark.parametrize(("edges", "counts"), [([], []), ([1], []), ([0, 1], [0]), ([1], [1, 2])])
def test_without_bars_there_is_no_histogram(edges, counts):
    assert histogram(edges, counts, ("x", "rows"), "title") is None
