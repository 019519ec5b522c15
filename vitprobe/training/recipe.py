"""The settings of one training, as one frozen value."""

import dataclasses
import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitprobe.names import unknown

Optimizer = Literal["adamw", "adam", "sgd"]
Decay = Literal["all", "matrices"]
Schedule = Literal["cosine", "cosine_from_start", "constant", "triangular", "triangular_tail"]
Granularity = Literal["step", "epoch"]
Precision = Literal["float32", "bfloat16"]

_CHOICES = {
    "optimizer": Optimizer,
    "decay": Decay,
    "schedule": Schedule,
    "warmup_per": Granularity,
    "schedule_per": Granularity,
    "precision": Precision,
}
_COUNTS = ("epochs", "batch_size", "accumulate", "repeats")
_NOT_NEGATIVE = ("weight_decay", "warmup_epochs", "warmup_lr", "min_lr", "mixup", "cutmix", "eps")
_PROBABILITIES = ("mix_probability", "mix_switch", "distillation")
# Settings that came later: at their defaults they are left out of the key of a run, which stays what it was.
_LATER = {
    "accumulate", "eps", "warmup_lr", "warmup_per", "schedule_per", "repeats", "distillation", "compile", "snapshots",
}  # fmt: skip
_BELOW_ONE = ("momentum", "label_smoothing", "stochastic_depth")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Equal recipes, data and initial weights give equal numbers on a CPU.

    Attributes:
        epochs: passes over the training images, warm-up included.
        batch_size: images per step, over all processes; the last batch of an epoch may be shorter.
        accumulate: each batch goes through the model in this many parts, whose gradients add up: the same step with
            less memory (batch normalisation sees the parts).
        optimizer: `"adamw"` (decoupled decay), `"adam"` or `"sgd"` (decay as an L2 term in the gradient).
        lr: the peak learning rate.
        weight_decay: the decay coefficient.
        decay: what decays: `"all"` parameters (Park and Kim 2022), or `"matrices"`: weights with two or more
            dimensions only, not normalisation, biases, gates, tokens and positions; but ConViT's position vectors.
        momentum: of `"sgd"`.
        betas: of `"adamw"` and `"adam"`.
        eps: of `"adamw"` and `"adam"`.
        warmup_epochs: the rate grows linearly over this many epochs; a fraction is allowed.
        warmup_lr: the learning rate that the warm-up starts from.
        warmup_per: whether it grows at every `"step"` or `"epoch"`.
        schedule: after the warm-up: `"cosine"` or `"triangular"` (a straight line) down to `min_lr`, or `"constant"`;
            `"cosine_from_start"` is a cosine over all epochs of which the warm-up hides the first (timm, DeiT);
            `"triangular_tail"` falls to a 20th of `lr` in two thirds of what the warm-up leaves, then to `min_lr`
            (ConvMixer on CIFAR).
        schedule_per: whether the rate changes at every `"step"` or `"epoch"` after the warm-up; in the rest of an
            epoch in which a warm-up ends it is `lr`.
        min_lr: the learning rate that the schedule ends at.
        augment: steps of `vitprobe.data.augmentation` joined by +, such as `"crop_flip+rand-m9-n2-mstd1.0+erase-0.25"`.
        repeats: each image comes this many times in a row, augmented differently, and an epoch sees that much fewer
            images (repeated augmentation, Hoffer et al. 2020).
        label_smoothing: this much of each target is spread evenly over all classes.
        mixup: the α of Beta(α, α) for mixup (Zhang et al. 2018); 0 is off.
        cutmix: the α of Beta(α, α) for CutMix (Yun et al. 2019); 0 is off.
        mix_probability: share of the batches that are mixed at all.
        mix_switch: share of the mixed batches that get CutMix, where both are on.
        stochastic_depth: drop rate of the last residual branch (Huang et al. 2016), growing linearly with
            depth from 0 at the first. It replaces the rates that the model was built with, also by 0.
        clip: largest global norm of the gradient; `None` is off.
        distillation: share of the loss that is the cross-entropy with the teacher's decision (hard distillation,
            Touvron et al. 2021: 0.5); 0 is off, and no teacher.
        precision: of the training's forward pass: `"float32"`, or `"bfloat16"` by autocast. Evaluation always
            has the weights' own.
        channels_last: whether images and weights lie in memory with the channels last.
        compile: whether the training's forward and backward pass go through `torch.compile`.
        snapshots: epochs after which the weights are kept in the run's folder; 0 are the initial weights.
        seed: of order, augmentation, mixing, dropout and stochastic depth; not of the initial weights.
        deterministic: whether PyTorch must choose deterministic algorithms (CUDA; slower).
    """

    epochs: int = 20
    batch_size: int = 128
    accumulate: int = 1
    optimizer: Optimizer = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    decay: Decay = "all"
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_epochs: float = 1.0
    warmup_lr: float = 0.0
    warmup_per: Granularity = "step"
    schedule: Schedule = "cosine"
    schedule_per: Granularity = "step"
    min_lr: float = 0.0
    augment: str = "none"
    repeats: int = 1
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    mix_switch: float = 0.5
    stochastic_depth: float = 0.0
    clip: float | None = None
    distillation: float = 0.0
    precision: Precision = "float32"
    channels_last: bool = False
    compile: bool = False
    snapshots: tuple[int, ...] = ()
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "snapshots", tuple(sorted(set(self.snapshots))))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise unknown(name, str(getattr(self, name)), get_args(choices))
        for name in (*_COUNTS, "seed"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, not {value!r}.")
            object.__setattr__(self, name, operator.index(value))
        for name in _COUNTS:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in _NOT_NEGATIVE:
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more, and finite")
        for name in _PROBABILITIES:
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in _BELOW_ONE:
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("lr", 0 < self.lr < math.inf, "above 0, and finite")
        self._require("clip", self.clip is None or self.clip > 0, "above 0, or None for no clipping")
        self._require("min_lr", self.min_lr <= self.lr, f"at most lr, {self.lr}")
        self._require("warmup_lr", self.warmup_lr <= self.lr, f"at most lr, {self.lr}")
        self._require("accumulate", self.accumulate <= self.batch_size, f"at most batch_size, {self.batch_size}")
        kept = all(isinstance(epoch, int) and 0 <= epoch <= self.epochs for epoch in self.snapshots)
        self._require("snapshots", kept, f"whole epochs from 0 to {self.epochs}, or none")
        self._require("warmup_epochs", self.warmup_epochs <= self.epochs, f"at most epochs, {self.epochs}")
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._require("betas", good, "two numbers, each at least 0 and below 1")

    def _require(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}.")

    def config(self) -> dict[str, Any]:
        """All settings in plain JSON types; `Recipe(**recipe.config())` is the same recipe."""
        return dataclasses.asdict(self) | {"betas": list(self.betas), "snapshots": list(self.snapshots)}

    def key(self) -> dict[str, Any]:
        """What the trained weights depend on, in plain JSON types; the same for recipes from before a setting came."""
        config, default = self.config(), Recipe().config()
        return {name: value for name, value in config.items() if name not in _LATER or value != default[name]}

    def stretched(self, fraction: float) -> "Recipe":
        """The recipe for a part of the training images that sees as many images in all, at the same learning rates.

        D'Ascoli et al. 2021 compare sample efficiency so: a fraction f of the images for 1/f times the epochs. Epochs,
        warm-up and snapshots stretch alike.

        Args:
            fraction: the part of the training images that is left, above 0 and at most 1.

        Raises:
            ValueError: if the fraction is not in that range.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction} of the training images: give a number above 0 and at most 1.")
        epochs = round(self.epochs / fraction)
        return dataclasses.replace(
            self,
            epochs=epochs,
            warmup_epochs=min(self.warmup_epochs / fraction, epochs),
            snapshots=tuple(min(round(epoch / fraction), epochs) for epoch in self.snapshots),
        )
