"""Attention heads that are a convolution, how many it takes, and how near fewer come (Li et al. 2021, theorems).

Claims     L1: nine heads over patches, each looking at one neighbour, are any convolution. L2: with patches nine heads
           are necessary, with single pixels K^2.
Command    vitprobe run li/construction                     seconds
           vitprobe run li/construction --scale cpu         20 random kernels of each case
Cost       Nothing is trained. Eleven cases of each kernel take about a second of one core (measured): quick 5 kernels,
           cpu 20.
Protocol   Random kernels and images of standard normal numbers, in double precision. P is the side of a patch, K that
           of the kernel [pixels], C -> D the channels. Heads look by position alone (logit 30 at their offset); tokens
           of zeros around the image make zero padding exact. A counted number of heads is how many patches of the
           output change with one patch of the image. The least error of fewer heads is what the singular values beyond
           them leave of the stack of the offsets' matrices (Eckart & Young): relative, root mean square over white
           images away from the border.
Rule       Set before the study ran, but not blindly: that the construction is exact was tested before, and the least
           errors of some 3 x 3 kernels on patches of 2 had been seen. The independent units are random kernels, and the
           statements are exact: a single kernel contradicts, and all must agree for support, of two or more; brackets
           are the smallest and the largest over kernels, no interval. L1: for 1 < K <= 2P + 1 the largest difference to
           the convolution is below 1e-8, the counted heads are nine, and eight are refused. L2: the rank of the stack
           is nine for these, K^2 for pixels and C D >= K^2, and one head fewer leaves a relative error above 1e-6.
           Judged beside them, without deciding: L1 without its condition (nine heads for K = 7 on patches of 2); the
           formula for the number of heads, (2 ceil((K - 1) / 2P) + 1)^2; L2 for pixels where C D < K^2, which fewer
           than K^2 heads contradict if they are built and are the convolution.
Expected   L1 and L2 supported under their conditions, and contradicted without them: 25 heads for K = 7 and P = 2, and
           13 of 25 heads enough for a 5 x 5 kernel from 3 to 4 channels on pixels. No recipe and no accuracy: the seed
           draws the kernel.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from studies.outcomes import part
from vitprobe.claims import CLAIMS, Claim, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, PALETTE, style
from vitprobe.initializers.convolution import (
    convolution_as_attention,
    head_widths,
    least_heads,
    lower_bound,
    patch_matrices,
    patch_offsets,
)
from vitprobe.models.attention import Attention, RelativeBias
from vitprobe.published.claims_li import PAPER
from vitprobe.results import provenance
from vitprobe.study import Settings, Study, main

EXACT = 1e-8  # largest difference that counts as none, in double precision
SOME = 1e-6  # relative error from which on fewer heads are not the convolution
KERNELS = {"smoke": 2, "quick": 5, "cpu": 20, "paper": 20}
GRIDS = {"smoke": (4, 5), "quick": (4, 5), "cpu": (8, 8), "paper": (8, 8)}  # patches; not square shows more
NINE, MANY, PIXELS, FEW = "nine heads", "larger kernel", "pixels", "pixels, few channels"


@dataclass(frozen=True)
class Case:
    """A kind of convolution.

    Attributes:
        kind: which claim it is for.
        patch_size: side of a patch [pixels].
        kernel_size: side of the kernel [pixels].
        channels: in and out.
    """

    kind: str
    patch_size: int
    kernel_size: int
    channels: tuple[int, int]

    @property
    def label(self) -> str:
        """For people."""
        return f"P={self.patch_size}, K={self.kernel_size}, {self.channels[0]}→{self.channels[1]}"


CASES = (
    Case(NINE, 2, 3, (3, 4)),
    Case(NINE, 2, 3, (1, 1)),
    Case(NINE, 2, 5, (3, 4)),
    Case(NINE, 3, 7, (3, 4)),
    Case(NINE, 4, 3, (3, 4)),
    Case(NINE, 4, 5, (3, 4)),
    Case(MANY, 2, 7, (3, 4)),
    Case(PIXELS, 1, 3, (3, 3)),
    Case(PIXELS, 1, 5, (5, 5)),
    Case(FEW, 1, 3, (2, 2)),
    Case(FEW, 1, 5, (3, 4)),
)


@dataclass(frozen=True)
class Drawn:
    """A random kernel of every case.

    Attributes:
        seed: they are drawn from.
        grid: patches of the images.
    """

    seed: int
    grid: tuple[int, int]
    model: str = "attention_heads"

    @property
    def label(self) -> str:
        """For people."""
        return f"kernel {self.seed}"

    def config(self) -> dict[str, Any]:
        """Everything the numbers depend on."""
        return asdict(self) | {"cases": [asdict(case) for case in CASES]}

    def fraction(self, cache: Path | None) -> float:
        """Nothing is trained."""
        return 0.0


def grid(settings: Settings) -> list[Drawn]:
    """The random kernels."""
    return [Drawn(seed, GRIDS[settings.scale]) for seed in range(settings.seeds or KERNELS[settings.scale])]


# --- measured ---------------------------------------------------------------------------------------


def measure(drawn: Drawn, settings: Settings) -> xr.Dataset:
    """What a random kernel of each case needs and gives, along `sample`."""
    ds = xr.concat([_of_case(case, drawn) for case in CASES], "sample", join="outer")
    ds = ds.assign_coords(sample=("sample", np.arange(len(CASES)), {"long_name": "case", "units": "1"}))
    ds["head"].attrs = {"long_name": "number of heads", "units": "1"}
    return ds.assign_coords(seed=((), drawn.seed, {"long_name": "seed of the kernel", "units": "1"})).assign_attrs(
        provenance(title="Convolution by attention heads", references=PAPER, config=drawn.config(), device="cpu")
    )


def _of_case(case: Case, drawn: Drawn) -> xr.Dataset:
    """The numbers of one kernel; `least_error` along the number of heads, from 1."""
    generator = torch.Generator().manual_seed(drawn.seed)
    inputs, outputs = case.channels
    size, patch = case.kernel_size, case.patch_size
    weight = torch.randn(outputs, inputs, size, size, dtype=torch.float64, generator=generator)
    shape = (2, inputs, patch * drawn.grid[0], patch * drawn.grid[1])
    images = torch.randn(shape, dtype=torch.float64, generator=generator)
    heads, rank = len(patch_offsets(size, patch)), least_heads(weight, patch)
    fewer = fewer_heads(weight) if case.kind == FEW else None
    numbers: dict[str, tuple[float, str]] = {
        "error": (_error(_attention(weight, images, patch), images, weight), "largest difference to the convolution"),
        "heads": (heads, "heads that the construction takes"),
        "counted_heads": (counted_heads(weight, patch), "patches of the output that change with one of the image"),
        "rank": (rank, "rank of the stack of the offsets' matrices, which heads have to span"),
        "width": (int(head_widths(weight, patch).max()), "width that the widest head needs"),
        "refused": (float(_refused(weight, images, patch, heads - 1)), "1 where a head fewer is refused"),
        "fewer_heads": (math.nan if fewer is None else rank + 1, "heads built for a stack of low rank"),
        "fewer_error": (
            math.nan if fewer is None else _error(fewer(drawn.grid), images, weight),
            "largest difference to the convolution of the heads built for a stack of low rank",
        ),
    }
    labels: dict[str, tuple[Any, str]] = {
        "case": (case.label, "patch, kernel and channels"),
        "kind": (case.kind, "which claim it is for"),
        "patch_size": (patch, "side of a patch [px]"),
        "kernel_size": (size, "side of the kernel [px]"),
    }
    counts = np.arange(1, heads + 1)
    least = [lower_bound(weight, patch, int(count)) for count in counts]
    text = "least relative error of so many heads that look by position alone"
    ds = xr.Dataset({name: ((), value, {"long_name": said, "units": "1"}) for name, (value, said) in numbers.items()})
    coords = {name: ((), value, {"long_name": said}) for name, (value, said) in labels.items()}
    return ds.assign(least_error=("head", least, {"long_name": text, "units": "1"})).assign_coords(
        coords | {"head": counts}
    )


def _attention(weight: Tensor, images: Tensor, patch: int) -> Callable[[Tensor], Tensor]:
    return convolution_as_attention(weight, image_size=(images.shape[-2], images.shape[-1]), patch_size=patch)


@torch.no_grad()
def _error(function: Callable[[Tensor], Tensor], images: Tensor, weight: Tensor) -> float:
    return float((function(images) - F.conv2d(images, weight, padding=weight.shape[-1] // 2)).abs().max())


def _refused(weight: Tensor, images: Tensor, patch: int, heads: int) -> bool:
    """Whether the construction refuses so many heads, saying how many it needs."""
    try:
        size = (images.shape[-2], images.shape[-1])
        convolution_as_attention(weight, image_size=size, patch_size=patch, heads=heads)
    except ValueError as refusal:
        return f"heads={heads + 1}" in str(refusal)
    return False


def counted_heads(weight: Tensor, patch: int) -> int:
    """How many patches of the convolution's output change with the middle patch of the image.

    Args:
        weight: of the convolution.
        patch: side of a patch [pixels].

    Returns:
        The count, which knows nothing of the construction.
    """
    radius = weight.shape[-1] // 2
    around = radius + patch  # patches that cannot change are there as well
    around += -around % patch
    image = F.pad(torch.ones(1, weight.shape[1], patch, patch, dtype=weight.dtype), 4 * [around])
    changed = F.conv2d(image, weight, padding=radius).ne(0).any(1, keepdim=True)
    return int(F.max_pool2d(changed.double(), patch).sum())


def fewer_heads(weight: Tensor) -> Callable[[tuple[int, int]], Callable[[Tensor], Tensor]]:
    """The convolution of single pixels by one head more than the rank of its taps, which may be below K^2.

    The taps' matrices are `sum_i u_i(d) N_i` with orthogonal `u_i`, one for each rank. A softmax cannot be negative,
    so that each head looks by `u_i(d) + c` instead, and a further one, which looks at all taps alike, takes the
    `c sum_i N_i` away again.

    Args:
        weight: of the convolution, in double precision.

    Returns:
        Of a grid of pixels, the attention as a function of images.
    """
    size, rank = weight.shape[-1], least_heads(weight, 1)
    matrices = patch_matrices(weight, 1)  # (tap, in, out)
    left, values, right = torch.linalg.svd(matrices.flatten(1), full_matrices=False)
    left, mixing = left[:, :rank].T, (values[:, None] * right)[:rank]
    lift = 2 * left.abs().max()
    looks = torch.cat([left + lift, torch.ones(1, size**2, dtype=weight.dtype)])  # (head, tap), above 0
    mixing = torch.cat([mixing, -lift * mixing.sum(0, keepdim=True)])
    total = looks.sum(1, keepdim=True)
    mixing = (total * mixing).unflatten(1, matrices.shape[1:])  # a head's weights sum to one

    def over(grid: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        inputs, outputs = matrices.shape[1:]
        position = RelativeBias(grid, rank + 1, margin=size // 2)
        attention = Attention(
            inputs, rank + 1, head_dim=outputs, out_dim=outputs, content=False, position=position, project_bias=False
        ).to(weight)
        with torch.no_grad():
            position.table.fill_(-100.0)  # what is no tap gets e^-100
            rows, columns = (slice(reach - size // 2, reach + size // 2 + 1) for reach in position.reach)
            position.table[:, rows, columns] = (looks / total).log().unflatten(1, (size, size))
            assert isinstance(attention.value, nn.Linear)
            attention.value.weight.copy_(rearrange(mixing, "h i o -> (h o) i"))
            attention.project.weight.copy_(torch.eye(outputs).repeat(1, rank + 1))
        return lambda images: attention(images.flatten(2).mT).mT.unflatten(2, grid)

    return over


# --- verdicts ---------------------------------------------------------------------------------------


def exactly(claim: Claim, ds: xr.Dataset, values: np.ndarray, holds: np.ndarray, rule: str, detail: str) -> Verdict:
    """The verdict on an exact statement, whose units are random kernels.

    Args:
        claim: the claim.
        ds: a row of cells.
        values: a number of each cell, of which the largest is shown and, in brackets, the smallest and the largest.
        holds: whether the statement holds for each cell.
        rule: when it does, in words.
        detail: what else a reader must know.

    Returns:
        Contradicted if it fails for one kernel, supported if it holds for all of two or more, else inconclusive.
    """
    kernels = len(np.unique(ds.seed.values))
    verdict = "contradicted" if not holds.all() else "supported" if kernels > 1 else "inconclusive"
    return Verdict(
        claim=claim,
        verdict=verdict,
        value=float(values.max()),
        low=float(values.min()),
        high=float(values.max()),
        n=kernels,
        unit="kernel",
        rule=f"{rule}, for every random kernel; brackets: smallest and largest over kernels and cases",
        detail=f"{detail}; cases {', '.join(dict.fromkeys(ds.case.values.tolist()))}",
    )


def cells(ds: xr.Dataset, **chosen: str) -> xr.Dataset:
    """All kernels of all cases in one row, or those whose coordinates have these values.

    Args:
        ds: stacked runs `(run, sample)`, or a row of cells.
        **chosen: the value of each coordinate.

    Returns:
        A row `(cell,)`.
    """
    row = ds if "cell" in ds.dims else ds.stack(cell=("run", "sample")).reset_index("cell")
    keep = np.ones(row.sizes["cell"], dtype=bool)
    for name, value in chosen.items():
        keep &= row[name].values == value
    return row.isel(cell=np.flatnonzero(keep))


def without_one(runs: xr.Dataset, heads: int | None = None) -> np.ndarray:
    """Of each cell the least relative error with so many heads; with one fewer than its rank unless given."""
    counts = runs["rank"].values - 1 if heads is None else np.full(runs.sizes["cell"], heads)
    errors = runs.least_error.transpose("cell", "head").values
    return np.array([row[int(count) - 1] for row, count in zip(errors, counts, strict=True)])


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """L1 and L2 under their conditions, and without them."""
    ds = cells(ds)
    nine, larger, pixels, few = (cells(ds, kind=kind) for kind in (NINE, MANY, PIXELS, FEW))
    error, counted = nine.error.values, nine.counted_heads.values
    l1 = exactly(
        CLAIMS["L1"], nine, error, (error < EXACT) & (counted == 9) & (nine.refused.values == 1),
        f"largest difference below {EXACT:g}, nine counted heads, eight refused",
        "for 1 < K <= 2P + 1, with tokens of zeros around the image",
    )  # fmt: skip
    left = without_one(larger, 9)
    unconditional = exactly(
        part(CLAIMS["L1"], "any kernel size", "nine heads are enough however large the kernel is"),
        larger, left, left <= SOME, f"least relative error of nine heads at most {SOME:g}",
        f"the kernel reaches {_span(larger.counted_heads)} patches",
    )  # fmt: skip
    formula = (2 * np.ceil((ds.kernel_size.values - 1) / (2 * ds.patch_size.values)) + 1) ** 2
    numbers = exactly(
        part(CLAIMS["L1"], "number", "a convolution takes (2 ceil((K - 1) / 2P) + 1)^2 heads, with which it is exact"),
        ds, ds.error.values, (ds.counted_heads.values == formula) & (ds.error.values < EXACT),
        f"counted heads as by the formula, largest difference below {EXACT:g}",
        f"{_span(ds.counted_heads)} heads",
    )  # fmt: skip
    needed = [
        exactly(
            part(CLAIMS["L2"], name, statement, published=published),
            runs, without_one(runs), (runs["rank"].values == expected) & (without_one(runs) > SOME),
            f"rank {words}, and one head fewer leaves a relative error above {SOME:g}",
            f"rank {_span(runs['rank'])}; heads by position alone",
        )
        for name, statement, published, runs, expected, words in (
            ("patches", "nine heads are necessary for 1 < K <= 2P + 1", "9", nine, 9, "nine"),
            ("pixels", "K^2 heads are necessary if C D >= K^2", "K^2", pixels, pixels.kernel_size.values**2, "K^2"),
        )
    ]  # fmt: skip
    built = (few.fewer_error.values < EXACT) & (few.fewer_heads.values < few.kernel_size.values**2)
    fewer = exactly(
        part(CLAIMS["L2"], "few channels", "K^2 heads are necessary however few the channels are", published="K^2"),
        few, few.fewer_error.values, ~built,
        f"fewer than K^2 heads are built and differ by more than {EXACT:g}",
        f"rank {_span(few['rank'])}; {_span(few.fewer_heads)} heads built, one more than the rank",
    )  # fmt: skip
    return [l1, unconditional, numbers, combine(CLAIMS["L2"], needed), *needed, fewer]


def _span(values: xr.DataArray) -> str:
    """The different values, as text."""
    return " and ".join(f"{value:g}" for value in np.unique(values.values))


# --- figure -----------------------------------------------------------------------------------------

SHOWN = ("P=2, K=3, 3→4", "P=2, K=7, 3→4", "P=1, K=3, 3→3", "P=1, K=5, 5→5", "P=1, K=5, 3→4")
MARKS = "osD^v"


def draw(ds: xr.Dataset) -> Figure:
    """Left: difference to the convolution by case. Right: least error against the number of heads."""
    ds, kernels = cells(ds), ds.sizes["run"]
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.3), layout="constrained")
        exact, bound = figure.subplots(1, 2, width_ratios=(1.0, 1.1))
        _differences(exact, ds)
        for label, color, mark in zip(SHOWN, PALETTE, MARKS, strict=False):
            _bound(bound, cells(ds, case=label), label, color, mark)
        bound.set(
            xlabel="number of heads", ylabel="least relative error [1]", xlim=(0, 26), ylim=(-0.02, 1),
            title="fewer heads, at their best",
        )  # fmt: skip
        bound.set_xticks([1, 4, 9, 12, 16, 20, 25])
        bound.legend(title="patch, kernel, channels: rank", alignment="left", loc="upper right")
        figure.supxlabel(
            f"{kernels} random kernel{'s' * (kernels > 1)} of each case; left: all of them, right: mean and range. "
            "P, K: sides of patch and kernel [pixels]. Heads look by position alone.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _differences(ax: Axes, ds: xr.Dataset) -> None:
    labels = list(dict.fromkeys(ds.case.values.tolist()))
    for place, label in enumerate(labels):
        runs = cells(ds, case=label)
        spread = np.linspace(-0.15, 0.15, runs.sizes["cell"]) if runs.sizes["cell"] > 1 else np.zeros(1)
        ax.scatter(
            runs.error, place + spread, s=9, color=PALETTE[0], linewidths=0,
            label="a head for each offset" if not place else None,
        )  # fmt: skip
        if runs.fewer_error.notnull().all():
            first = "one head more than the rank" if label == _first_few(ds) else None
            ax.scatter(runs.fewer_error, place + spread, s=9, color=PALETTE[1], marker="^", linewidths=0, label=first)
    ticks = [f"{label}: {_needed(ds, label)}" for label in labels]
    ax.set_yticks(range(len(labels)), labels=ticks)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.axvline(EXACT, color=GREY, linewidth=0.8, linestyle="--", label="counts as none")
    ax.set_xscale("log")
    low = float(min(ds.error.min(), ds.fewer_error.min()))
    ax.set_xlim(10 ** (math.floor(math.log10(low)) - 0.2), 10 * EXACT)
    ax.set(xlabel="largest difference to the convolution [1]", title="patch, kernel, channels: heads")
    ax.figure.legend(loc="outside upper left", ncols=3, handletextpad=0.3, columnspacing=1.2)


def _first_few(ds: xr.Dataset) -> str:
    return str(cells(ds, kind=FEW).case.values[0])


def _needed(ds: xr.Dataset, label: str) -> str:
    runs = cells(ds, case=label)
    fewer = f" or {_span(runs.fewer_heads)}" if runs.fewer_heads.notnull().all() else ""
    return f"{_span(runs.heads)}{fewer}"


def _bound(ax: Axes, runs: xr.Dataset, label: str, color: str, mark: str) -> None:
    errors: Sequence[np.ndarray] = runs.least_error.transpose("cell", "head").values
    heads = int(runs.heads.values[0])
    x, drawn = np.arange(1, heads + 1), np.stack([row[:heads] for row in errors])
    ax.fill_between(x, drawn.min(0), drawn.max(0), color=color, alpha=0.2, linewidth=0)
    ax.plot(x, drawn.mean(0), color=color, marker=mark, markersize=3, label=f"{label}: {_span(runs['rank'])}")


STUDY = Study(
    name="li/construction",
    title="Attention heads that are a convolution",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
