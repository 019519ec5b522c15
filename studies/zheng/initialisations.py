"""The initialisations that Zheng et al. 2024 compare: which they are here, and how figures show them."""

from collections.abc import Mapping
from typing import Any

from studies.outcomes import Look
from vitprobe.figures.page import BLUE, GREY, VERMILION
from vitprobe.study import Settings

BLURRED = "blurred impulse"
LOOKS = {
    "random": Look("random", GREY, "o"),
    "mimetic": Look("mimetic", BLUE, "s"),
    "impulse": Look("impulse", VERMILION, "^"),
}


def initialisers(name: str, settings: Settings, *, tokens: bool = False) -> Mapping[str, Mapping[str, Any]]:
    """What writes an initialisation, as a `Run` takes it.

    Random is the model's own. Mimetic is the paper's, which sets queries and keys alone. Impulses are fitted to the
    position code as it is, as published, whatever share of it the maps see later. Where the maps see tokens too, the
    weights themselves are fitted, as published; else their coordinates along the code, which gives the same maps
    sooner. On small grids they are sharp, with a kernel of three tokens; at the paper scale of five, and the fit stops
    at the attention of 0.3 on the wanted token that the published fit reaches by our computation, because the published
    one takes 10,000 steps a layer. So does that of the blurred ones at every scale.

    Args:
        name: one of `LOOKS`, or `BLURRED`.
        settings: of the study.
        tokens: whether the maps see tokens beside the code.

    Returns:
        Initialisers and their options; none for `"random"`.
    """
    reach: dict[str, Any] = {"kernel_size": 5 if settings.scale == "paper" else 3}
    if settings.scale == "paper" or name == BLURRED:
        reach["target_mass"] = 0.3
    # Weights that see nothing but the code would keep more of the impulse beside tokens than the published ones do.
    fitted = {"coordinates": "weights"} if tokens else {}
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {
        "random": {},
        "mimetic": {"mimetic_": {"variant": "zheng"}},
        "impulse": {"impulse_": {"pseudo_input": "positions", **reach, **fitted}},
    }
    found[BLURRED] = found["impulse"]
    return found[name]
