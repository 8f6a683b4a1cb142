"""Certificates: what is promised, why, and whether it is seen."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import analysis, models
from hdnn.analysis import certificate, image_certificate, words
from hdnn.errors import DataError, OptionError, ShapeError
from strategies import ACTIVATIONS, MONOTONE, Random, seeds, sizes

F64 = torch.float64
ALWAYS = ("H2", "ImplicitH2", "MS1", "MS3", "verlet", "yoshida4", "midpoint")
KINDS = (*ALWAYS, "H1", "MS2", "MLP")


def make(kind, n=4, N=5, **options):
    options = {"generator": torch.Generator().manual_seed(0), **options}
    if kind in ("verlet", "yoshida4", "midpoint"):
        return hdnn.HamiltonianNet(n, N, kind, **options)
    return getattr(hdnn, kind)(n, N, **options)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(ACTIVATIONS),
    sizes,
    st.integers(1, 60),
    seeds,
    st.floats(0.01, 1.0),
)
@settings(max_examples=30)
def test_nothing_that_is_guaranteed_is_ever_broken(kind, activation, m, N, seed, h):
    normal, options = Random(seed), {"activation": activation, "init": "paper", "dtype": F64}
    if kind in ("ImplicitH2", "midpoint"):
        options["init"], h = "scaled", min(h, 0.2)
    if kind != "MLP":
        options["step"] = h
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2"):
        options["X"] = normal(m, m)
    net = make(kind, 2 * m, N, **options, generator=normal.generator)
    found = analysis.certify(net, normal(5, 2 * m))
    assert found.guaranteed == (
        kind in ALWAYS or (kind in ("H1", "MS2") and activation in MONOTONE)
    )
    assert not found.broken
    assert found.holds or not found.guaranteed
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2", "midpoint", "MS3"):
        assert found.symplectic
    low, high = found.by_layer["smallest"][:-1], found.by_layer["largest"][:-1]
    assert found.smallest_norm == min(low)
    assert found.largest_norm == max(high)


def test_sin_breaks_what_tanh_guarantees_for_forward_euler():
    sin = make("H1", 4, 64, activation="sin", step=0.5, init="paper", dtype=F64)
    found = analysis.certify(sin, 3 * Random(0)(50, 4))
    assert found.holds is None
    assert "sin, which can decrease" in found.verdict
    assert not found.broken  # nothing was promised


def test_a_certificate_is_a_table_a_json_object_and_a_picture(tmp_path):
    model = hdnn.Model(hdnn.Augment(2, 4), make("H2", 4, 20), hdnn.SigmoidHead(4))
    found = analysis.certify(model, torch.randn(7, 2), points="test points")
    text = str(found)
    for word in (
        "H2(4 features, 20 layers",
        "7 test points; weights float32",
        "symplectic",
        "yes",
    ):
        assert word in text
    assert "guaranteed at any depth" in text
    told = json.loads(found.to_json())
    assert told["samples"] == 7
    assert told["broken"] == []
    assert {b["name"] for b in told["bounds"]} >= {"lem:upper_bound", "budget exp(B)"}
    ax = found.plot()
    ax.figure.savefig(tmp_path / "norms.png")
    assert "7 samples" in ax.get_title()


def test_what_is_broken_is_said():
    found = analysis.certify(make("H2"))
    bad = replace(found, holds=False, smallest_norm=0.5, symplectic=False)
    assert bad.verdict.startswith("BROKEN: norm(dy_N/dy_j) >= 1, but it is 0.5; symplecticity")
    assert bad.plot().get_title() == "A guarantee does not hold numerically"
    bound = replace(found.bounds[-1], measured=1e9)
    assert "the bound budget exp(B)" in replace(found, bounds=(bound,)).verdict


def test_norms_beyond_float64_are_told_and_break_nothing():
    net = make("H2", 2, 600, step=1.0, dtype=F64, activation="identity")  # b = 0: y_j stays 0
    with torch.no_grad():
        net.K_p.fill_(5.0)
        net.K_q.fill_(5.0)
    found = analysis.certify(net, torch.zeros(3, 2, dtype=F64))
    assert found.overflow is not None
    assert found.largest_norm == float("inf")
    assert found.holds
    assert not found.broken
    assert "beyond what float64 can hold" in str(found)
    assert json.loads(found.to_json())["largest_norm"] is None


# What could not be computed


def runaway(layers=40, **options):
    """A network of large finite weights, whose states leave float64."""
    net = make("H2", 4, layers, step=10.0, activation="identity", **options)
    with torch.no_grad():
        net.K_p.mul_(1e5)
        net.K_q.mul_(1e5)
    return net


def learned_step(log_h):
    net = make("H2", 4, 4, learn_step=True)
    with torch.no_grad():
        net.log_h.fill_(log_h)
    return net


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (learned_step(800.0), "because the step h of layer 0 is inf"),
        (runaway(), r"because the state y_\d+ is (NaN|infinite)"),
    ],
)
def test_a_network_without_finite_outputs_is_never_said_to_hold(net, why):
    found = analysis.certify(net, Random(0)(10, 4))
    assert not net.double()(Random(0)(10, 4)).isfinite().any()
    assert found.guaranteed  # the theorem stands, and nothing was seen of it
    assert found.holds is None
    assert found.symplectic is None
    assert not any(bound.holds for bound in found.bounds)
    assert not found.broken
    assert (found.status, found.computed) == ("not computed", 0)
    assert "holds" not in found.verdict
    assert found.verdict.startswith("COULD NOT BE COMPUTED: the norms at all 10 points")
    assert re.search(why, found.verdict)
    assert "holds" not in str(found)
    told = json.loads(found.to_json())
    assert (told["status"], told["computed"], told["smallest_norm"]) == ("not computed", 0, None)
    assert re.search(why, told["unknown"])
    assert found.plot().get_title() == "Not all norms could be computed"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3.0), (torch.float16, 0.3)])
def test_a_network_that_overflows_in_its_own_dtype_alone_is_not_said_to_hold(dtype, size):
    net = make("H2", 4, 40, step=1.0, activation="identity")
    with torch.no_grad():
        net.K_p.mul_(10 * size)
        net.K_q.mul_(10 * size)
    y = Random(0)(10, 4)
    net = net.to(dtype)
    found = analysis.certify(net, y)
    assert analysis.certify(net.double(), y).holds  # the same weights do not, in float64
    assert (found.status, found.holds, found.computed) == ("not computed", None, 0)
    assert "outputs of the network itself, in float" in found.verdict


def test_units_that_overflow_in_their_own_dtype_alone_are_not_said_to_hold():
    model = models.hdnn_star("h2", 4, (4,), size=8, activation="identity")
    with torch.no_grad():
        model.stages[0].K_p.fill_(1e5)
        model.stages[0].K_q.fill_(1e5)
    x = Random(0)(2, 3, 8, 8)
    (found,) = image_certificate.certify_images(model, x).parts
    assert not model(x.float()).isfinite().any()
    assert (found.status, found.holds, found.computed) == ("not computed", None, 0)
    assert "in float32, are not finite" in found.verdict


def test_hooks_that_change_what_a_network_computes_are_seen():
    net = make("H2", dtype=F64)
    recorded = []
    net.register_forward_hook(lambda net, y, out: recorded.append(out))
    assert analysis.certify(net).holds  # that one changes nothing
    net.register_forward_hook(lambda net, y, out: 0.1 * out)
    found = analysis.certify(net)
    assert (found.status, found.holds) == ("not computed", None)
    assert "is not its layers one after the other" in found.verdict


def test_samples_that_could_not_be_computed_are_counted():
    net = make("H2", 4, 3, step=1.0, activation="identity", dtype=F64)
    y = Random(0)(10, 4)
    y[[2, 7]] = 1e308
    with torch.no_grad():
        net.K_p.mul_(3)
        net.K_q.mul_(3)
    found = analysis.certify(net, y)
    assert (found.computed, found.samples, found.holds) == (8, 10, None)
    assert "at 2 of 10 points" in found.verdict
    assert found.smallest_norm >= 1  # of the others, which are all the same as without those two
    rest = analysis.certify(net, y[[0, 1, 3, 4, 5, 6, 8, 9]])
    assert rest.holds
    assert (rest.smallest_norm, rest.largest_norm) == (found.smallest_norm, found.largest_norm)


def test_matrices_past_float64_at_finite_states_are_not_computed():
    net = make("H2", 2, 3, step=1.0, activation="tanh", dtype=F64)
    with torch.no_grad():
        net.K_p.fill_(1e200)
    found = analysis.certify(net, torch.zeros(2, 2, dtype=F64))
    assert net(torch.zeros(2, 2, dtype=F64)).isfinite().all()
    assert (found.status, found.holds) == ("not computed", None)
    assert "past the largest number" in found.verdict


def test_units_whose_states_are_not_finite_are_not_computed():
    unit = hdnn.HamiltonianUnit(4, 40, network="h2", step=1.0, activation="relu")
    with torch.no_grad():
        unit.K_p.mul_(1e6)
        unit.K_q.mul_(1e6)
    y, none = Random(0)(2, 4, 3, 3).abs(), torch.zeros(2, dtype=torch.bool)
    found = image_certificate.unit_certificate(unit.double().eval(), y, F64, "images", none)
    assert (found.status, found.holds, found.computed) == ("not computed", None, 0)
    whole = image_certificate.Certificates("net", (found,))
    assert "not finite" in whole.unknown
    assert whole.to_dict()["unknown"] == whole.unknown
    assert "holds" not in str(whole)


def test_lanczos_that_has_not_seen_norm_1_yet_breaks_nothing(monkeypatch):
    monkeypatch.setattr(image_certificate, "STEPS", 1)
    monkeypatch.setattr(image_certificate, "MORE", 1)
    seen, none = set(), torch.zeros(1, dtype=torch.bool)
    for seed in range(30):
        torch.manual_seed(seed)
        unit = hdnn.HamiltonianUnit(4, 2, network="h2", step=0.05, dtype=F64).eval()
        y = Random(seed)(1, 4, 24, 24)  # 2304 entries: too many for the whole matrix
        found = image_certificate.unit_certificate(unit, y, F64, "images", none)
        assert not found.broken
        seen.add(found.holds)
    assert seen == {True, None}


# Sound networks and broken ones


def test_no_sound_shear_is_called_broken_however_large():
    for seed in range(100):
        normal = Random(seed)
        m, s = 1 + seed % 6, 10.0 ** (14 * seed / 100)
        net = make("H2", 2 * m, 1, step=1.0, activation="identity", dtype=F64)
        Q = torch.linalg.qr(normal(m, m)).Q
        with torch.no_grad():
            net.K_p.copy_(s**0.5 * Q)
            net.K_q.zero_()
        found = analysis.certify(net, normal(3, 2 * m))
        assert found.status == "holds", found.verdict
        assert all(bound.holds for bound in found.bounds if bound.rigorous)


@given(
    st.sampled_from((*ALWAYS, "H1", "MS2")), st.sampled_from(ACTIVATIONS), seeds, st.floats(0, 4)
)
@settings(max_examples=30)
def test_one_per_cent_less_in_each_layer_is_seen(kind, activation, seed, scale):
    h = 0.1 if kind in ("ImplicitH2", "midpoint") else 0.3
    normal = Random(seed)
    net = make(kind, 4, 3, activation=activation, step=h, dtype=F64, generator=normal.generator)
    if not analysis.guarantee(net).holds:
        return
    with pytest.MonkeyPatch.context() as patch:
        true = hdnn.networks.Network.layer_jacobians
        wrong = lambda *args: true(*args) + 0.01 * normal(4, 4)  # noqa: E731
        patch.setattr(hdnn.networks.Network, "layer_jacobians", wrong)
        found = analysis.certify(net, scale * normal(3, 4))
    assert found.symplectic is not True
    if kind not in ("H1", "MS1", "MS2"):
        assert found.broken


def test_rounding_is_told_from_a_broken_promise(monkeypatch):
    net = make("H2", dtype=F64)
    true = hdnn.networks.Network.layer_jacobians
    shrunk = lambda *args: 0.9 * true(*args)  # noqa: E731
    monkeypatch.setattr(hdnn.networks.Network, "layer_jacobians", shrunk)
    assert analysis.certify(net).broken


def test_random_points_follow_the_seed_and_their_number_is_kept_in_bounds(monkeypatch):
    net = make("H2")
    assert analysis.certify(net, seed=1) == analysis.certify(net, seed=1)
    assert analysis.certify(net, seed=1) != analysis.certify(net, seed=2)
    assert analysis.certify(net, torch.randn(50, 4), samples=3).samples == 3
    monkeypatch.setattr(certificate, "NUMBERS", 5 * 101 * 4**2)
    deep = make("H2", 4, 100, T=1.0)
    assert analysis.certify(deep, torch.randn(2000, 4)).samples == 5


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        ((torch.nn.Linear(2, 2),), OptionError, "certify takes a hdnn.Model"),
        ((make("H2"), torch.ones(3, 5)), ShapeError, r"y must be a tensor \(\*batch, 4\)"),
        ((make("H2"), "y"), ShapeError, "but got str"),
        ((make("H2"), torch.full((1, 4), torch.nan)), DataError, "NaN or infinite"),
    ],
)
def test_mistakes_are_one_sentence(given_, error, text):
    with pytest.raises(error, match=text):
        analysis.certify(*given_)


def test_weights_that_are_no_numbers_cannot_be_certified():
    net = make("H2")
    with torch.no_grad():
        net.K_p[0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="the weight K_p is not finite"):
        analysis.certify(net)


# Who has a promise


class Defaults(hdnn.H2):
    """Only other defaults, a name, and something new."""

    def __init__(self, features, layers):
        super().__init__(features, layers, activation="relu", dtype=F64)

    def extra_repr(self, *, learned=True):
        return "mine, " + super().extra_repr(learned=learned)

    def depth(self):
        return self.layers


class Damped(hdnn.H2):
    def layer(self, y, j):
        return 0.5 * super().layer(y, j)

    def forward(self, y):
        for j in range(self.layers):
            y = self.layer(y, j)
        return y


class Promising(Damped):
    def guarantee(self):
        return analysis.Guarantee(True, "mine", "because I say so")


class Later(Promising):
    def weights(self):
        return super().weights()


class Squashed(hdnn.H2):
    def forward(self, y):
        return torch.tanh(super().forward(y))


class Weighted:
    def weights(self):
        return super().weights()


class Mixed(Weighted, hdnn.MS1):
    pass


def test_a_subclass_that_only_sets_defaults_keeps_the_promise():
    net = Defaults(4, 3)
    assert analysis.guarantee(net) == net.guarantee() == analysis.guarantee(make("H2"))
    assert analysis.certify(net).status == "holds"


@pytest.mark.parametrize(
    ("kind", "own"), [(Damped, "forward, layer"), (Squashed, "forward"), (Mixed, "weights")]
)
def test_a_subclass_that_computes_in_its_own_way_inherits_no_promise(kind, own):
    net = kind(4, 3)
    assert analysis.guarantee(net) == net.guarantee()
    found = analysis.guarantee(net)
    assert not found.holds
    assert found.theorem == "none"
    assert f"nothing is known of {kind.__name__}, which has its own {own};" in found.why
    assert "no guarantee" in analysis.certify(net).verdict


def test_a_method_that_is_put_on_a_network_ends_its_promise():
    net = make("H2")
    net.forward = lambda y: 0 * y
    assert not analysis.guarantee(net).holds


def test_a_unit_that_computes_in_its_own_way_inherits_no_promise():
    class Half(hdnn.HamiltonianUnit):
        def forward(self, y):
            return 0.5 * super().forward(y)

    assert analysis.guarantee(hdnn.HamiltonianUnit(4, 2, network="h2")).holds
    assert not analysis.guarantee(Half(4, 2, network="h2")).holds


def test_a_promise_of_ones_own_is_held_against_what_the_layers_do():
    net = Promising(4, 3, dtype=F64)
    assert analysis.guarantee(net).why == "because I say so"
    assert not analysis.guarantee(Later(4, 3)).holds  # that was of another forward
    found = analysis.certify(net, Random(0)(5, 4))
    y = Random(0)(4)
    M = torch.autograd.functional.jacobian(net, y)
    seen = analysis.backward_sensitivity(net, y, layers=[0])[0]
    torch.testing.assert_close(seen, M.mT)
    assert found.verdict.startswith("BROKEN: norm(dy_N/dy_j) >= 1, but it is 0.")


def test_what_is_not_made_of_its_layers_cannot_be_computed():
    found = analysis.certify(Squashed(4, 3))
    assert found.status == "not computed"
    assert "Squashed is not its layers one after the other" in found.verdict
    with pytest.raises(OptionError, match="give it a `layer`"):
        analysis.backward_sensitivity(Squashed(4, 3), torch.ones(4))


# In plain words


KEPT = "From every layer on, some direction of the gradient keeps at least its full size"


def test_a_certificate_begins_with_one_plain_sentence():
    found = replace(analysis.certify(make("H2"), Random(0)(7, 4)), smallest_norm=1.1799)
    assert found.summary == f"{KEPT}: the smallest norm measured is 1.17."
    assert str(found).startswith(f"{found.summary}\n\nnetwork")
    assert str(found).index("layers j") < str(found).index("theorem")
    assert found.to_dict()["summary"] == found.summary


def test_what_is_not_promised_is_not_said_to_be():
    found = analysis.certify(make("MLP", 4, 40), Random(0)(50, 4), points="test points")
    assert found.summary.startswith("Nothing is promised for this network, it was only measured: ")
    assert "shrinks in every direction at one or more of 50 test points" in found.summary
    enough = replace(found, smallest_norm=1.25)
    assert "kept at least its full size at 50 test points, and the smallest norm is 1.25" in (
        enough.summary
    )
    one = replace(found, samples=1, computed=1)
    assert "at one of the test points" in one.summary


def test_what_was_not_computed_or_is_broken_is_said_first():
    assert analysis.certify(runaway(), Random(0)(10, 4)).summary.startswith(
        "It is NOT KNOWN whether the gradient keeps its size: the norms could not be computed at "
        "all 10 points, because the state"
    )
    found = analysis.certify(make("H2"))
    bad = replace(found, holds=False, smallest_norm=0.9999999)
    assert bad.summary == (
        "A GUARANTEE DOES NOT HOLD HERE: the smallest norm measured is 0.999, where at least 1 is "
        "promised."
    )
    assert "symplecticity" in replace(found, symplectic=False).summary
    doubt = replace(found, holds=None, trouble="rounding hides it")
    assert doubt.summary.endswith("keeps its size: rounding hides it.")


@pytest.mark.parametrize("told", [{}, {"holds": None, "guaranteed": True}, {"holds": "maybe"}])
def test_nothing_that_is_missing_in_a_file_counts_as_holding(told):
    assert "NOT KNOWN" in words.summary(told)


def test_parts_are_summed_up():
    found = analysis.certify(make("H2")).to_dict()
    rounded = {**found, "linear": False, "smallest_norm": 1 - 1e-10}
    assert words.summary(rounded).endswith("the smallest norm measured is 1, up to rounding.")
    both = words.summary_of_parts([{**found, "smallest_norm": 1.5}, {**found, "smallest_norm": 2}])
    assert both.startswith("In each of the 2 Hamiltonian parts, from every layer on, some")
    assert "smallest norm measured is 1.5." in both
    other = words.summary_of_parts([found, analysis.certify(make("MLP")).to_dict()])
    assert other.startswith("In 1 of the 2 Hamiltonian parts, from every layer on, some")
    assert "Part 2: Nothing is promised" in other


@pytest.mark.parametrize(
    ("norm", "text"),
    [(1 - 1e-15, "1"), (1.17999, "1.17"), (0.99999, "0.999"), (1234.5, "1.23e+03"), (0.0, "0")],
)
def test_norms_are_rounded_down(norm, text):
    assert words.at_least_text(norm) == text


# Networks that are linear


@pytest.mark.parametrize("kind", ["H2", "H1", "MS1", "MS3", "verlet", "midpoint"])
def test_layers_without_weights_pass_their_input_on(kind):
    net = make(kind)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    for y in (None, torch.zeros(1, 4)):
        found = analysis.certify(net, y)
        assert (found.linear, found.idle) == (True, True)
        assert found.summary.startswith("The network is linear, to within 0.1% at ")
        assert "its layers pass their input on. A linear model would do the same." in found.summary
        assert KEPT in found.summary


def tiny(net, size):
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(size)
    return net


def test_layers_that_add_next_to_nothing_are_linear_unless_the_head_makes_much_of_it():
    net, head = make("H2", 4, 8, init="paper", activation="relu"), hdnn.SigmoidHead(4)
    tiny(net, 1e-3)
    assert analysis.certify(net).idle
    model = hdnn.Model(hdnn.Augment(2, 4), net, head)
    assert analysis.certify(model).idle
    with torch.no_grad():  # the head looks at nothing but what the layers add to the zeros
        head.weight.copy_(torch.tensor([[0.0, 1e6, 1e6, 0.0]]))
    assert analysis.certify(model).linear is False


def test_an_identity_makes_one_matrix_of_all_layers():
    found = analysis.certify(make("H2", activation="identity"))
    assert (found.linear, found.idle) == (True, False)
    assert "act as one and the same matrix" in found.summary


def test_jumps_between_flat_places_are_not_linear():
    net = make("H2", 4, 3, init="paper")
    tiny(net, 1e8)  # tanh is 1 or -1 everywhere, and all matrices are the identity
    found = analysis.certify(net)
    assert found.largest_norm == 1
    assert found.linear is False


@pytest.mark.parametrize("kind", KINDS)
def test_networks_as_they_are_made_are_not_linear(kind):
    assert analysis.certify(make(kind, init="paper"), Random(0)(20, 4)).linear is False


def test_few_points_do_not_make_a_network_linear():
    one = Random(0)(1, 4).expand(50, 4)
    assert analysis.certify(make("H2"), one).linear is False
    assert analysis.certify(make("H2", activation="identity"), one).linear
    assert analysis.certify(tiny(make("H2", 4, 3, init="paper"), 1e8), one).linear is False
    assert analysis.certify(tiny(make("H2", init="paper"), 1e-4), one).idle


def test_of_points_that_could_not_be_computed_nothing_is_concluded():
    assert analysis.certify(runaway(), Random(0)(50, 4)).linear is None


def test_units_that_do_nothing_are_linear():
    model = models.hdnn_star("h2", 3, (4,), size=8)
    x = Random(0)(2, 3, 8, 8)
    assert image_certificate.certify_images(model, x).parts[0].linear is False
    tiny(model.stages[0], 0.0)
    (found,) = image_certificate.certify_images(model, x).parts
    assert (found.linear, found.idle) == (True, True)
