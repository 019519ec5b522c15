"""What the traced forward pass finds in models that nobody here wrote; writes the table of the README.

    python tests/benchmarks/foreign_models.py            prints the table
    python tests/benchmarks/foreign_models.py --write    puts it into README.md, between its markers

Random weights: only the structure counts. Every row is one pass on two images of 224x224 pixels.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vitprobe.attach import plan
from vitprobe.calling import untouched

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- foreign models: begin -->", "<!-- foreign models: end -->"
KINDS = ("stem", "msa", "conv", "mlp", "subsample")

TIMM = (
    "vit_tiny_patch16_224",
    "convit_tiny",
    "pit_ti_224",
    "swin_tiny_patch4_window7_224",
    "resnet18",
    "convmixer_768_32",
    "mixer_s32_224",
)
TORCHVISION = ("vit_b_16", "swin_t", "resnet18")


def from_timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)


def from_torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def from_transformers(name: str) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, name.replace("ForImageClassification", "Config"))())


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"timm `{name}`": lambda name=name: from_timm(name) for name in TIMM},
    **{f"torchvision `{name}`": lambda name=name: from_torchvision(name) for name in TORCHVISION},
    "transformers `ViTForImageClassification`": lambda: from_transformers("ViTForImageClassification"),
}


def row(name: str) -> str:
    """One row of the table: units by kind, attention maps, and the grids they are on."""
    model = MODELS[name]()
    with untouched(model):
        found = plan(model, torch.zeros(2, 3, 224, 224).normal_(generator=torch.Generator().manual_seed(0)))
    kinds = Counter(unit.kind for unit in found.units)
    maps = Counter(
        f"{site.heads} heads on {site.grid[0]}x{site.grid[1]}"
        + (f" in {site.windows} windows" if site.windows > 1 else "")
        + (f", {site.prefix} prefix" if site.prefix else "")
        for site in found.attentions
    )
    shown = "; ".join(f"{count} of {text}" for text, count in maps.items()) or "none"
    return f"| {name} | {' | '.join(str(kinds[kind] or '') for kind in KINDS)} | {shown} |"


def table(rows: list[str]) -> str:
    """The whole table in Markdown."""
    head = f"| model | {' | '.join(KINDS)} | attention maps |"
    return "\n".join([head, f"|---|{'---|' * len(KINDS)}---|", *rows])


def main() -> None:
    warnings.simplefilter("ignore")
    text = table([row(name) for name in MODELS])
    if "--write" not in sys.argv:
        print(text)
        return
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
