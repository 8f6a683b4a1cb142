"""The config of a training on the images of mnist and cifar10.

All blanks are filled in at once, from the recipe of the paper's table, so that the config.toml of a
run says everything that a flag could have said.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hdnn.app.configs.common import check_time, check_training
from hdnn.base.config import BaseConfig, option
from hdnn.base.memory import check_memory
from hdnn.errors import OptionError, choose

if TYPE_CHECKING:
    from hdnn.training.images import ImageRecipe

HIDDEN = ("step", "T", "activation", "init", "smoothness")  # only for Hamiltonian layers
RECIPE = ("batch", "optimizer", "learning_rate", "weight_decay", "clip", "smoothness")
NUMBERS = {"mnist": 8 * 28**2, "cifar10": 64 * 32**2}  # about as many in the state of one image
WEIGHTS = {"mnist": 8**2, "cifar10": 9 * (64**2 + 96**2 + 144**2)}  # about as many in a layer
STEPS, LEAST = 20, 10  # steps in an epoch of few images; images in such a minibatch
SEEDS = 2**32  # the seed of an epoch is a multiple of it


@dataclass(frozen=True, kw_only=True)
class ImageConfig(BaseConfig):
    """Everything that decides the result of a training on images.

    None means that an option does not apply: no Hamiltonian layers, no warm-up, no clipping.
    """

    kind: ClassVar[str] = "images"

    data: str
    network: str = "h2"
    layers: int | None = None
    step: float | None = None
    T: float | None = None
    activation: str | None = None
    init: str | None = None
    images: int | None = option(
        None,
        "of mnist and cifar10, train and test on so many each, for a quick look",
        panel="Data",
    )
    epochs: int = 40
    patience: int | None = None
    batch: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    warmup: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    smoothness: float | None = None
    seed: int = 0
    device: str = "cpu"

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """From options by their names, checked, with all blanks filled in."""
        options = cls.without_kind(options)
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                listed = ", ".join(name.replace("_", "-") for name in known[1:])
                raise OptionError(
                    f"{options['data']} is a set of images, and a training on images has no option "
                    f"{name.replace('_', '-')}; it has {listed}."
                )
        return cls(**options)._checked()._filled()

    @property
    def is_plain(self) -> bool:
        """Whether the network has no Hamiltonian layers."""
        from hdnn.training.images import recipes as image_recipes

        return image_recipes.is_plain(self.data, self.network, self.layers)

    def _checked(self) -> Self:
        """The same with the network's plain name, or an error before any work is done."""
        from hdnn.training.checks import whole_number
        from hdnn.training.images.recipes import NETWORKS

        network = choose("network", self.network.lower().replace("-", "_"), NETWORKS[self.data])
        config = replace(self, network=network)
        if self.layers is not None:
            whole_number("layers", self.layers, 0 if self.data == "mnist" else 1)
        config._check_hidden()
        check_time(self.T, self.step)
        for name in ("images", "patience"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        if not 0 <= self.seed < SEEDS:
            raise OptionError(f"seed must be from 0 to 2^32 - 1, but got {self.seed}.")
        given = {name: getattr(self, name) for name in (*RECIPE, "warmup")}
        given = {name: value for name, value in given.items() if value is not None}
        check_training({**given, "epochs": self.epochs, "seed": self.seed})
        if None not in (self.images, self.batch) and self.batch > self.images:  # pyright: ignore
            raise OptionError(
                f"a minibatch of {self.batch} images is larger than the {self.images} to train on."
            )
        return config

    def _check_hidden(self) -> None:
        from hdnn import activations
        from hdnn.networks.initial import INITS

        given = [name for name in HIDDEN if getattr(self, name) is not None]
        if self.is_plain and self.data != "mnist" and self.layers is not None:
            given.insert(0, "layers")
        if self.is_plain and given:
            what = "a network of 0 layers" if self.data == "mnist" else self.network
            raise OptionError(f"{what} has no Hamiltonian layers: it takes no {given[0]}.")
        if self.activation is not None:
            activations.registered(self.activation)
        if self.init is not None:
            choose("init", self.init, INITS)

    def _filled(self) -> Self:
        """The same with the recipe's values where nothing was given."""
        from hdnn.training.images import recipes as image_recipes

        blanks: dict[str, Any] = {}
        if not self.is_plain:
            blanks = image_recipes.hidden(self.data, self.network)
            if self.T is not None:
                del blanks["step"]
        found = self._table()
        blanks |= {name: getattr(found, name) for name in RECIPE}
        if self.is_plain:
            del blanks["smoothness"]
        if self.images is not None:  # few images make few steps: use more, smaller minibatches
            most = max(self.images // STEPS, min(self.images, LEAST))
            blanks["batch"] = min(found.batch, most)
            if self.batch is None:
                blanks["learning_rate"] *= blanks["batch"] / found.batch
        if found.decay is None and not found.rates:
            blanks["warmup"] = found.warmup
        return replace(self, **{k: v for k, v in blanks.items() if getattr(self, k) is None})

    def _table(self) -> ImageRecipe:
        from hdnn.training.images import recipes as image_recipes

        layers = self.layers
        return image_recipes.recipe(self.data, self.network, layers, self.epochs, self.seed)

    def recipe(self) -> ImageRecipe:
        """How to train; a given warm-up replaces the recipe's other schedules of the rate."""
        given = {k: getattr(self, k) for k in (*RECIPE, "warmup") if getattr(self, k) is not None}
        found = replace(self._table(), **given)
        if self.warmup is not None:
            found = replace(found, decay=None, rates=())
        # On a CPU half precision may be far slower, without any warning.
        return replace(found, bf16=found.bf16 and self.device.startswith("cuda"))

    def hidden(self) -> dict[str, Any]:
        """The options of the Hamiltonian layers, for `image_recipes.build`."""
        if self.is_plain:
            return {"layers": 0} if self.data == "mnist" else {}
        assert self.layers is not None
        step = self.step if self.T is None else self.T / self.layers
        return {
            "layers": self.layers,
            "step": step,
            "activation": self.activation,
            "init": self.init,
        }

    def check_memory(self) -> None:
        """Refuse what this machine cannot hold."""
        from hdnn.training.images import recipes as image_recipes

        if self.is_plain or self.layers is None or self.batch is None:
            return
        # Weights, gradients and two moments; the states of a minibatch, unless they are rebuilt.
        rebuilt = image_recipes.rebuilds(self.network, {"layers": self.layers})
        states = 0 if rebuilt else NUMBERS[self.data] * min(self.batch, 10**6)
        needed = 4 * self.layers * (4 * WEIGHTS[self.data] + states)
        check_memory(needed, f"{self.layers} layers in minibatches of {self.batch}", "layers")

    def run_name(self) -> str:
        """The name of the run's folder, such as mnist-h2-8-0."""
        parts = (self.data, self.network, self.layers, self.seed)
        return "-".join(str(part) for part in parts if part is not None)
