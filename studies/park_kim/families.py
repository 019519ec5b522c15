"""What the studies of Park & Kim (2022) share: the families at every scale, and the steps between units."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from studies.outcomes import Look, if_learned
from studies.scales import chosen
from vitprobe.claims import CLAIMS, Claim, Verdict, combine, decide, sign_test
from vitprobe.probes import FeatureProbe
from vitprobe.results import to_json
from vitprobe.runs import DataSpec, Run, trained
from vitprobe.study import Settings
from vitprobe.training import Recipe, make_recipe

REFERENCES = "Park & Kim 2022, arXiv:2202.06709"

# By what mixes places, from convolutions alone to any fixed weights. Okabe and Ito's colours, but for the PiT's: their
# yellow is too pale for lines on white.
LOOKS = {
    "resnet": Look("ResNet", "#0072B2", "o"),
    "convmixer": Look("ConvMixer", "#009E73", "D"),
    "alternet": Look("AlterNet", "#E69F00", "^"),
    "swin": Look("Swin", "#56B4E9", "v"),
    "pit": Look("PiT", "#4B0055", "P"),
    "convit": Look("ConViT", "#CC79A7", "X"),
    "vit": Look("ViT", "#D55E00", "s"),
    "mixer": Look("MLP-Mixer", "#000000", "p"),
}

NANO = (
    "resnet_nano", "convmixer_nano", "vit_nano", "convit_nano", "alternet_nano", "pit_nano", "swin_nano",
)  # fmt: skip
MICRO = (
    "resnet_micro", "convmixer_micro", "vit_micro", "convit_micro", "alternet_micro", "pit_micro", "swin_micro",
)  # fmt: skip
PAPER = ("preact_resnet50", "convmixer", "vit_ti", "convit_ti", "alternet50", "pit_ti", "swin_ti")

# scale: models, data, seeds, recipe. One recipe for all families, as in the paper; its snapshots are those before the
# training, after the warm-up, and after each third of what follows, as the paper's spectra are.
SCALES: dict[str, tuple[Sequence[str], DataSpec, int, Recipe]] = {
    "smoke": (
        NANO,
        DataSpec(spec="digits", train_size=200, test_size=100),
        2,
        Recipe(epochs=1, batch_size=50, warmup_epochs=0.5, snapshots=(0, 1)),
    ),
    "quick": (
        NANO,
        DataSpec(spec="digits"),
        3,
        Recipe(epochs=25, batch_size=32, lr=2e-3, augment="crop", channels_last=True, snapshots=(0, 1, 9, 17, 25)),
    ),
    "cpu": (
        MICRO,
        DataSpec(spec="cifar10", train_size=10_000, test_size=2_000),
        3,
        Recipe(epochs=8, batch_size=32, lr=1e-3, augment="crop_flip", channels_last=True, snapshots=(0, 1, 3, 5, 8)),
    ),
    "paper": (
        PAPER,
        DataSpec(spec="cifar100"),
        3,
        # The paper trains in float32; half precision is what a GPU of today is fast in.
        make_recipe("park_kim_strong", precision="bfloat16", channels_last=True),
    ),
}


def family(model: str) -> str:
    """The family of a registered model, one of `LOOKS`: `"resnet"` of `"preact_resnet50"` and `"resnet_micro"`.

    Args:
        model: its name.
    """
    return model.removeprefix("preact_").partition("_")[0].rstrip("0123456789")


def grid(settings: Settings) -> list[Run]:
    """All families at a scale, seed by seed, so that a study that is stopped early has whole seeds."""
    models, data, seeds, recipe = SCALES[settings.scale]
    images = chosen(settings, data)
    return [
        Run(model=model, data=images, recipe=replace(recipe, seed=seed))
        for seed in range(settings.seeds or seeds)
        for model in models
    ]


def measure(run: Run, settings: Settings, probe: FeatureProbe) -> xr.Dataset:
    """Train the run (or take it from the cache) and probe it on the whole test set."""
    result = trained(run, cache=settings.cache, device=settings.device)
    ds = probe.run(result.model, result.data.loader("test", batch_size=100), progress=False)
    last = result.history.isel(epoch=-1)
    return ds.assign_attrs(
        seed=run.recipe.seed,
        accuracy=100 * float(last.test_accuracy),
        accuracy_se=100 * float(np.sqrt(last.test_accuracy * (1 - last.test_accuracy) / len(result.data.test.labels))),
        test_loss=float(last.test_loss),
        data=run.data.spec.partition(":")[0],
        classes=result.data.num_classes,
        run_config=to_json(run.config()),
    )


def steps(ds: xr.Dataset, variable: str) -> xr.DataArray:
    """The change of a variable that each unit makes `(run, layer)`; NaN for stems and wherever the grid changes."""
    before = ds[variable].shift(layer=1)
    same_grid = (ds.grid_h == ds.grid_h.shift(layer=1)) & (ds.grid_w == ds.grid_w.shift(layer=1))
    return (ds[variable] - before).where(same_grid & ~ds.kind.isin(["stem", "subsample", ""]))


def judge(ds: xr.Dataset, variable: str, claim: Claim, headline: Sequence[str]) -> list[Verdict]:
    """Verdicts on "attention lowers, convolutions and MLPs raise": the whole claim, then every family and kind.

    The deciding statistic of a seed is the *median* step over the units of a kind: its sign says which way most units
    go, it does not hang on the early blocks that the paper excepts, and it has a spread where a share of units would
    be saturated. The interval runs over seeds. The share of units and its sign test are stated beside it. A network
    that did not learn is no evidence for anything.

    Args:
        ds: stacked runs.
        variable: what steps.
        claim: the published claim.
        headline: model families the claim was published for; others are reported, and do not decide.
    """
    change = steps(ds, variable)
    parts: dict[tuple[str, str], Verdict] = {}
    for model in dict.fromkeys(ds.model.values.tolist()):
        runs = np.flatnonzero(ds.model == model)
        of_model, kinds = change.isel(run=runs), ds.kind.isel(run=runs)
        for kind, direction in (("msa", "below"), ("mlp", "above"), ("conv", "above")):
            rows = of_model.where(kinds == kind).values
            rows = [row[np.isfinite(row)] for row in rows]
            if not all(len(row) for row in rows):
                continue
            share, p = sign_test(np.concatenate(rows), direction)
            word = "fall" if direction == "below" else "rise"
            part = Claim(
                id=f"{claim.id} {kind} {model}",
                paper=claim.paper,
                statement=f"{kind} units of {model} {'lower' if direction == 'below' else 'raise'} {variable}",
                statistic=claim.statistic,
                published="",
                source=claim.source,
            )
            verdict = decide(
                part,
                [float(np.median(row)) for row in rows],
                threshold=0.0,
                direction=direction,
                detail=f"{share:.0%} of {sum(map(len, rows))} units {word} (one-sided sign test p = {p:.2g})",
            )
            parts[model, kind] = if_learned(verdict, ds.isel(run=runs))
    deciding = [verdict for (model, _), verdict in parts.items() if model in headline]
    return [combine(claim, deciding), *parts.values()]


def headline(ds: xr.Dataset) -> list[str]:
    """The families that the paper published these claims for: the ResNet and the plain ViT."""
    return [model for model in dict.fromkeys(ds.model.values.tolist()) if family(model) in ("resnet", "vit")]


__all__ = ["CLAIMS", "LOOKS", "family", "grid", "headline", "judge", "measure", "steps"]
