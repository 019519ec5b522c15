"""What probing costs, side by side in one run: over the bare forward pass, and over other ways to the same numbers.

    python tests/benchmarks/probe_overhead.py [--case vit vit_ti convit vit_b] [--only probes memory ...]
    python tests/benchmarks/probe_overhead.py --threads 1 --write results/benchmarks/probe_overhead_cpu

For a CIFAR ViT, a ViT-Ti at 224 pixels and a CIFAR ConViT, whose attention has gates (and for a ViT-B at 224 pixels, if
asked for), untrained, in float32, on images of noise with labels:

- probes: the time of each feature probe alone and of all together over the bare pass.
- memory: the peak of a process that probes over that of one that does not.
- notebooks: spectra and variances as the papers' notebooks take them: every block's activation of all images is
  stored, then there are a full transform, a logarithm and a diagonal. The numbers must be equal to 1e-4.
- extraction: handing over each block's activation and doing nothing with it, by vitprobe, by timm's feature extraction
  and by torchvision's. The activations must be equal.
- plan: what is done once per model, over a bare pass of two images.
- transform: the half-diagonal of spectra over the full two-dimensional transform, by size of the maps.

Every action is handed its batches one by one, and after each of them a bare pass over the same batch is timed, so
that both run under the same conditions; ratios are of the sums of a round: median (least to most) over rounds. A
round of few images pays for the plan as well. So there is a second ratio, of what each further image costs, from both
sums less those of four images, fewer than which some probes do not take. On a machine that other work shares, --clock
cpu counts what this process has used.
"""

import argparse
import copy
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
import xarray as xr
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torch.fx.proxy import TraceError
from torchvision.models.feature_extraction import create_feature_extractor

from vitprobe.attach import plan
from vitprobe.calling import untouched
from vitprobe.models import create_model
from vitprobe.probes import FEATURE_PROBES, FeatureProbe, FeatureVariance, Fourier, probe
from vitprobe.probes.fourier import half_diagonal

PACKAGES = ("vitprobe", "torch", "torchvision", "timm", "numpy", "xarray")
BARE, ALL, BLOCKS = "the bare pass", "all feature probes", "blocks.*"
FIRST_THREE: tuple[str, ...] = ("fourier", "feature_variance", "nonlocality")
GOAL = {FIRST_THREE: "at most 1.3"}  # set for all probes there were at the time; none for all of now
MEMORY_GOAL = {("vit_b", ALL): "under 2048"}
TOLERANCE = 1e-4
Reads = Literal["activation", "attention", "gated attention"]
MAPS = [(56, 64, 96), (28, 64, 192), (14, 64, 192), (8, 64, 192), (7, 64, 768)]  # side, images, channels


@dataclass(frozen=True)
class Case:
    """A network and the images that it is shown.

    Attributes:
        text: what it is.
        side: of the images [pixels].
        size: images in a batch.
        count: batches.
        options: of vitprobe's `create_model`, or of timm's.
        norms: names of the layers whose inputs are the stream, two in each of `blocks` and one after the last; none
            where blocks have no such layers.
        timm: whether the network is timm's.
    """

    text: str
    side: int
    size: int
    count: int
    options: dict[str, Any]
    norms: tuple[str, ...] = ()
    timm: bool = False

    def build(self, device: str, *, times: int = 1) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        """The network in evaluation mode, and the batches, more of them if asked for."""
        torch.manual_seed(0)
        model = timm.create_model(**self.options) if self.timm else create_model(**self.options)
        shape = (self.size, 3, self.side, self.side)
        batches = [
            (torch.randn(shape, device=device), torch.randint(0, 10, (self.size,), device=device))
            for _ in range(self.count * times)
        ]
        return model.eval().to(device), batches


OUR_NORMS, TIMM_NORMS = ("attention_norm", "mlp_norm", "norm"), ("norm1", "norm2", "norm")
SMALL = {"image_size": 32, "patch_size": 4, "dim": 192, "depth": 6}
CASES = {
    "vit": Case("ViT 192x6, patch 4, 32 px", 32, 64, 8, {"name": "vit", **SMALL}, OUR_NORMS),
    "vit_ti": Case("timm ViT-Ti/16, 224 px", 224, 32, 4, {"model_name": "vit_tiny_patch16_224"}, TIMM_NORMS, timm=True),
    "convit": Case(
        "ConViT 192x6 (5 gated), patch 4, 32 px", 32, 64, 8, {"name": "convit", "heads": 4, "gpsa_layers": 5, **SMALL}
    ),
    "vit_b": Case("timm ViT-B/16, 224 px", 224, 32, 1, {"model_name": "vit_base_patch16_224"}, TIMM_NORMS, timm=True),
}


class Report:
    """What is printed, which is Markdown, and the same as numbers; both are written anew after every table."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = arguments.write
        self.lines: list[str] = []
        self.figures: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "processor": _processor(),
            "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "clock": CLOCKS[arguments.clock][1],
            "load at the start": load(),
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "cases": {},
        }
        self.say("# Probes: cost over the bare pass, side by side\n")
        self.say("Made by `tests/benchmarks/probe_overhead.py`, which says what is measured and how to repeat it.\n")
        for key, value in list(self.figures.items())[:-1]:
            self.say(f"- {key}: {value}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def table(
        self, case: str, part: str, figures: Any, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        self.figures["cases"].setdefault(case, {})[part] = figures
        self.say(f"\n### {title}\n")
        for row in (head, ["---"] * len(head), *rows):
            self.say(f"| {' | '.join(row)} |")
        self.write()

    def write(self) -> None:
        if self.path:
            path = Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".md").write_text("\n".join(self.lines) + "\n")
            path.with_suffix(".json").write_text(json.dumps(self.figures, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load() -> str:
    """How many processes wanted to run, on average over the last 1, 5 and 15 minutes."""
    return " ".join(f"{one:.1f}" for one in os.getloadavg())


def progress(what: str) -> None:
    print(f"  {datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """Median and range."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:{digits}}" if least == most else f"{median:{digits}} ({least:{digits}} to {most:{digits}})"


# --- time -------------------------------------------------------------------------------------------

CLOCKS: dict[str, tuple[Callable[[], float], str]] = {
    "wall": (time.perf_counter, "wall"),
    "cpu": (time.process_time, "processor time of the process"),
}
Action = Callable[[Any, Iterable], Any]


def bare(model: nn.Module, batches: Iterable) -> None:
    with torch.no_grad():
        for images, _ in batches:
            model(images)


@dataclass
class Timer:
    """Seconds on one clock, of one device."""

    clock: Callable[[], float]
    device: str

    def __call__(self, action: Callable[[], Any]) -> float:
        start = self.clock()
        action()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return self.clock() - start

    def beside(self, action: Action, model: nn.Module, twin: nn.Module, batches: list) -> tuple[float, float]:
        """Seconds of an action on batches, and those of a twin's bare passes between them."""
        passes: list[float] = []

        def stream() -> Iterator[Any]:
            for batch in batches:
                yield batch
                passes.append(self(partial(bare, twin, [batch])))

        gc.collect()
        total = self(partial(action, model, stream()))
        return total - sum(passes), sum(passes)


@dataclass
class Timed:
    """Seconds of one action in every round, and of the bare passes beside it.

    Attributes:
        taken: of the action, on all images.
        bare: of the bare passes, on all images.
        few_taken: of the action, on four images.
        few_bare: of the bare pass, on four images.
    """

    taken: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    few_taken: list[float] = field(default_factory=list)
    few_bare: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.taken, self.bare, strict=True)]

    def further(self) -> list[float]:
        """The same of what is not paid once: the time less that of four images."""
        pairs = zip(self.taken, self.few_taken, self.bare, self.few_bare, strict=True)
        return [(a - a2) / (b - b2) for a, a2, b, b2 in pairs]

    def once(self) -> list[float]:
        """Seconds that are paid once, whatever the number of images."""
        return [a - b for a, b in zip(self.few_taken, self.few_bare, strict=True)]


def in_turn(
    actions: Mapping[str, Action], model: nn.Module, batches: list, arguments: argparse.Namespace
) -> dict[str, Timed]:
    """Each action on the batches, timed one after the other in every round, after a warm-up of each on few images."""
    timer = Timer(CLOCKS[arguments.clock][0], arguments.device)
    twin = copy.deepcopy(model)  # which nothing is hooked to
    few = [tuple(tensor[:4] for tensor in batches[0])]
    bare(twin, batches)
    for action in actions.values():
        action(model, few)
    found = {name: Timed() for name in actions}
    for number in range(arguments.rounds):
        for name, action in actions.items():
            progress(f"round {number}, {name}")
            one = found[name]
            for taken, passes, shown in ((one.taken, one.bare, batches), (one.few_taken, one.few_bare, few)):
                seconds = timer.beside(action, model, twin, shown)
                taken.append(seconds[0])
                passes.append(seconds[1])
    return found


# --- memory -----------------------------------------------------------------------------------------


def peak_memory(case: str, action: str, threads: int, *, times: int = 1) -> float:
    """Peak resident memory of a fresh process that runs one action [MiB]."""
    progress(f"memory, {action}")
    command = [sys.executable, __file__, "--child", json.dumps([case, action, times]), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def child(case: str, action: str, times: int) -> None:
    model, batches = CASES[case].build("cpu", times=times)
    actions: dict[str, Action] = {BARE: bare, **probe_actions(()), **notebook_actions(CASES[case])}
    actions[action](model, batches)
    # Not getrusage: a child's maximum there starts at its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1024)


def measures_memory(report: Report, arguments: argparse.Namespace) -> bool:
    if arguments.device == "cpu" and Path("/proc/self/status").exists():
        return True
    report.say("\nMemory is measured on the CPU of a Linux machine only: left out.")
    return False


# --- every probe ------------------------------------------------------------------------------------


class Nothing(FeatureProbe):
    """A probe that does nothing with what it is handed: what remains is the cost of watching."""

    name = "nothing"
    title = "Nothing"
    references = "none"

    def __init__(self, reads: Reads = "activation") -> None:
        self.reads = reads  # type: ignore[misc]  # of the class, as a rule

    def start(self) -> None:
        """Forget nothing."""

    def update(self, where: Any, what: Any) -> None:
        """Do nothing."""

    def dataset(self, places: Sequence[Any]) -> xr.Dataset:
        """Nothing."""
        return xr.Dataset()


def watched(model: nn.Module, batches: Iterable, *, one: FeatureProbe, layers: str = "auto") -> None:
    probe(model, batches, [one], layers=layers, progress=False)


def probed(model: nn.Module, batches: Iterable, names: Sequence[str]) -> xr.DataTree:
    return probe(model, batches, [FEATURE_PROBES[name]() for name in names], missing="skip", progress=False)


def probe_actions(skipped: Collection[str]) -> dict[str, Action]:
    """Each probe that has something to measure alone, and several together, by name."""
    names = [name for name in FEATURE_PROBES if name not in skipped]
    together = {", ".join(FIRST_THREE): FIRST_THREE, ALL: names}
    return {name: partial(probed, names=chosen) for name, chosen in ({n: (n,) for n in names} | together).items()}


@cache
def left_out(name: str, device: str) -> dict[str, str]:
    """Which probes have nothing to measure in a case, and why."""
    model, batches = CASES[name].build(device)
    few = [tuple(tensor[:4] for tensor in batches[0])]
    return json.loads(probed(model, few, list(FEATURE_PROBES)).attrs.get("left_out", "{}"))


def part_probes(name: str, report: Report, arguments: argparse.Namespace) -> None:
    model, batches = CASES[name].build(arguments.device)
    skipped = left_out(name, arguments.device)
    watching: dict[Reads, str] = {"activation": "activations", "attention": "attention maps"}
    if "attention_gates" not in skipped:
        watching["gated attention"] = "maps and their parts"
    actions: dict[str, Action] = {
        f"nothing, handed {text}": partial(watched, one=Nothing(reads)) for reads, text in watching.items()
    }
    times = in_turn(actions | probe_actions(skipped), model, batches, arguments)
    rows = [
        [
            what,
            spread(one.taken),
            spread(one.bare),
            spread(one.ratios()),
            spread(one.further()),
            spread(one.once()),
            GOAL.get(tuple(what.split(", ")), "none was set" if what == ALL else ""),
        ]
        for what, one in times.items()
    ]
    images = sum(len(x) for x, _ in batches)
    head = [
        "probes",
        "seconds",
        BARE,
        "ratio",
        "ratio of each further image",
        "seconds paid once",
        "goal for the ratio",
    ]
    figures = {what: vars(one) for what, one in times.items()}
    report.table(
        name,
        "probes",
        figures,
        f"Time over the bare pass, {images} images in batches of {len(batches[0][0])}",
        head,
        rows,
    )


def part_memory(name: str, report: Report, arguments: argparse.Namespace) -> None:
    if not measures_memory(report, arguments):
        return
    actions = (BARE, *probe_actions(left_out(name, arguments.device)))
    peaks = {action: peak_memory(name, action, arguments.threads) for action in actions}
    rows = [
        [
            action,
            f"{peak:.0f}",
            f"{peak - peaks[BARE]:.0f}",
            f"{peak / peaks[BARE]:.2f}",
            MEMORY_GOAL.get((name, action), "at most 1.2" if action == ", ".join(FIRST_THREE) else ""),
        ]
        for action, peak in peaks.items()
    ]
    head = ["process", "MiB", "MiB over the bare pass", "over the bare pass", "goal"]
    title = f"Peak memory of the whole process, batches of {CASES[name].size}"
    report.table(name, "memory", peaks, title, head, rows)


# --- the notebooks' way -----------------------------------------------------------------------------


def stored(case: Case, model: Any, batches: Iterable) -> list[Tensor]:
    """Every residual branch's activation of all images `(image, token, channel)`, before the first block too."""
    first, second, last = case.norms
    norms = [norm for block in model.blocks for norm in (getattr(block, first), getattr(block, second))]
    kept: list[list[Tensor]] = [[] for _ in range(len(norms) + 1)]
    hooks = [
        norm.register_forward_pre_hook(lambda module, args, here=here: here.append(args[0]))
        for norm, here in zip([*norms, getattr(model, last)], kept, strict=True)
    ]
    try:
        bare(model, batches)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in kept]


def as_maps(model: Any, x: Tensor) -> Tensor:
    """Tokens `(image, token, channel)` as maps `(image, channel, row, column)`, prefix tokens left out."""
    x = x[:, model.num_prefix_tokens :]
    side = math.isqrt(x.shape[1])
    return x.transpose(1, 2).unflatten(-1, (side, side))


def notebook_spectrum(model: nn.Module, batches: Iterable, case: Case) -> np.ndarray:
    """Log amplitude by unit and frequency (Park & Kim 2022, Fig. 2a)."""
    rows = []
    for x in stored(case, model, batches):
        spectrum = torch.fft.fft2(as_maps(model, x))
        logs = torch.log(spectrum.abs() + 1e-6)
        centred = torch.fft.fftshift(logs, dim=(-2, -1)).mean((0, 1))
        diagonal = centred.diagonal()[len(centred) // 2 :]
        rows.append(diagonal - diagonal[0])
    return torch.stack(rows).cpu().numpy()


def notebook_variance(model: nn.Module, batches: Iterable, case: Case) -> np.ndarray:
    """Variance over positions by unit (Park & Kim 2022, Fig. 9)."""
    found = [as_maps(model, x).flatten(2).var(-1).mean() for x in stored(case, model, batches)]
    return torch.stack(found).cpu().numpy()


def our_spectrum(model: nn.Module, batches: Iterable) -> np.ndarray:
    return Fourier("paper").run(model, batches, progress=False).relative_log_amplitude.values


def our_variance(model: nn.Module, batches: Iterable) -> np.ndarray:
    return FeatureVariance().run(model, batches, progress=False).variance.values


def notebook_actions(case: Case) -> dict[str, Action]:
    """Our way and the notebooks', in turn, for spectra and for variances."""
    return {
        "vitprobe, spectra": our_spectrum,
        "notebooks, spectra": partial(notebook_spectrum, case=case),
        "vitprobe, variances": our_variance,
        "notebooks, variances": partial(notebook_variance, case=case),
    }


def part_notebooks(name: str, report: Report, arguments: argparse.Namespace) -> None:
    model, batches = CASES[name].build(arguments.device)
    actions = notebook_actions(CASES[name])
    values = {action: call(model, batches) for action, call in actions.items()}
    pairs = list(zip(list(actions)[::2], list(actions)[1::2], strict=True))
    differences = {}
    for ours, theirs in pairs:
        a, b = values[ours], values[theirs]
        differences[theirs] = float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))
        if a.shape != b.shape or not differences[theirs] <= TOLERANCE:
            raise SystemExit(f"{name}: {ours} and {theirs} differ by {differences[theirs]:.1e}, more than {TOLERANCE}.")
    times = in_turn(actions, model, batches, arguments)
    memory: dict[str, dict[int, float]] = {}
    if measures_memory(report, arguments):
        memory = {
            action: {times: peak_memory(name, action, arguments.threads, times=times) for times in (1, 4)}
            for action in (BARE, *actions)
        }
    images = sum(len(x) for x, _ in batches)
    rows = []
    for ours, theirs in pairs:
        for action in (ours, theirs):
            one = times[action]
            over_ours = [a / b for a, b in zip(one.ratios(), times[ours].ratios(), strict=True)]
            mine = [f"{memory[action][n] - memory[BARE][n]:.0f}" for n in (1, 4)] if memory else ["", ""]
            difference = f"{differences[action]:.0e}" if action in differences else ""
            rows.append([action, spread(one.taken), spread(one.ratios()), spread(over_ours), *mine, difference])
    head = [
        *("what", "seconds", "over the bare pass", "over vitprobe"),
        *(f"MiB over the bare pass, {images * n} images" for n in (1, 4)),
        "difference",
    ]
    figures = {"times": {what: vars(one) for what, one in times.items()}, "memory": memory, "differences": differences}
    report.table(name, "notebooks", figures, f"Against the papers' notebooks, {images} images", head, rows)


# --- activations alone ------------------------------------------------------------------------------


class First(Nothing):
    """Keeps the activations of the first batch, to compare them."""

    whole_batches = True

    def start(self) -> None:
        """Forget them."""
        self.kept: dict[int, Tensor] = {}

    def update(self, where: Any, what: Any) -> None:
        """Keep patches `(image, row, column, channel)`."""
        self.kept.setdefault(where.index, what.patches)


def by_timm(model: Any) -> Callable[[Tensor], list[Tensor]]:
    """All blocks by timm, which cuts what follows them off the model, maps `(image, channel, row, column)`."""
    return FeatureGetterNet(copy.deepcopy(model), out_indices=len(model.blocks)).eval()


def by_torchvision(model: Any) -> Callable[[Tensor], list[Tensor]]:
    """All blocks by torchvision, tokens `(image, token, channel)`."""
    names = {f"blocks.{index}": str(index) for index in range(len(model.blocks))}
    graph = create_feature_extractor(copy.deepcopy(model), names).eval()
    return lambda images: list(graph(images).values())


TIMM, TORCHVISION = "timm, FeatureGetterNet", "torchvision, create_feature_extractor"


def extracted(model: nn.Module, batches: Iterable, *, call: Callable[[Tensor], list[Tensor]]) -> None:
    with torch.no_grad():
        for images, _ in batches:
            call(images)


def part_extraction(name: str, report: Report, arguments: argparse.Namespace) -> None:
    model, batches = CASES[name].build(arguments.device)
    first = First()
    watched(model, batches[:1], one=first, layers=BLOCKS)
    ours = list(first.kept.values())
    actions: dict[str, Action] = {
        "vitprobe, every block": partial(watched, one=Nothing(), layers=BLOCKS),
        "vitprobe, every residual branch": partial(watched, one=Nothing()),
    }
    differences: dict[str, float] = {}
    for what, build in {TIMM: by_timm, TORCHVISION: by_torchvision}.items():
        if what == TIMM and not CASES[name].timm:
            continue
        try:
            call = build(model)
        except TraceError as error:
            report.say(f"\n{what} cannot follow this network: {str(error).split('. ')[0]}.")
            continue
        with torch.no_grad():
            theirs = call(batches[0][0])
        theirs = [x if x.ndim == 4 else as_maps(model, x) for x in theirs]
        differences[what] = max(
            float((a.permute(0, 3, 1, 2) - b).abs().max()) for a, b in zip(ours, theirs, strict=True)
        )
        if not differences[what] <= TOLERANCE:
            raise SystemExit(f"{name}: activations by {what} differ by {differences[what]:.1e} from vitprobe's.")
        actions[what] = partial(extracted, call=call)
    times = in_turn(actions, model, batches, arguments)
    rows = [
        [
            what,
            spread(one.taken),
            spread(one.ratios()),
            spread(one.further()),
            f"{differences[what]:.0e}" if what in differences else "",
        ]
        for what, one in times.items()
    ]
    head = ["what", "seconds", "over the bare pass", "of each further image", "difference from vitprobe's"]
    figures = {"times": {what: vars(one) for what, one in times.items()}, "differences": differences}
    report.table(name, "extraction", figures, "Handing over activations, nothing done with them", head, rows)


# --- once per model ---------------------------------------------------------------------------------


def part_plan(name: str, report: Report, arguments: argparse.Namespace) -> None:
    model, batches = CASES[name].build(arguments.device)
    two = [tuple(tensor[:2] for tensor in batches[0])]

    def planned() -> None:
        with untouched(model):
            plan(model, two[0])

    timer = Timer(CLOCKS[arguments.clock][0], arguments.device)
    planned()
    bare(model, two)
    pairs = [(timer(planned), timer(partial(bare, model, two))) for _ in range(2 * arguments.rounds)]
    taken, passes = (list(column) for column in zip(*pairs, strict=True))
    rows = [
        ["plan", spread([1e3 * one for one in taken], ".0f"), spread([a / b for a, b in pairs])],
        ["bare pass of two images", spread([1e3 * one for one in passes], ".0f"), "1"],
    ]
    head = ["what", "milliseconds", "ratio"]
    report.table(name, "plan", {"taken": taken, "bare": passes}, "Once per model", head, rows)


# --- the half-diagonal ------------------------------------------------------------------------------


def transforms(report: Report, arguments: argparse.Namespace) -> None:
    timer = Timer(CLOCKS[arguments.clock][0], arguments.device)
    rows, figures = [], {}
    for side, images, channels in MAPS:
        x = torch.randn(images, side, side, channels, device=arguments.device)
        maps = x.permute(0, 3, 1, 2).contiguous()
        full, half = (lambda maps=maps: torch.fft.fft2(maps).abs()), (lambda x=x: half_diagonal(x))
        full(), half()
        pairs = [(timer(full), timer(half)) for _ in range(2 * arguments.rounds)]
        size = f"{images} x {side}x{side} x {channels}"
        figures[size] = pairs
        slow, fast = ([1e3 * one for one in column] for column in zip(*pairs, strict=True))
        rows.append([size, spread(slow, ".1f"), spread(fast, ".1f"), spread([a / b for a, b in pairs]), "at least 8"])
    head = ["images x map x channels", "full, milliseconds", "half-diagonal", "ratio", "goal"]
    report.table("transform", "transform", figures, "The half-diagonal of spectra over the full transform", head, rows)


PARTS = {
    "probes": part_probes,
    "memory": part_memory,
    "notebooks": part_notebooks,
    "extraction": part_extraction,
    "plan": part_plan,
}
OF_BLOCKS = ("notebooks", "extraction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that other work shares")
    parser.add_argument("--case", nargs="+", choices=CASES, default=["vit", "vit_ti", "convit"])
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "transform"], help="parts; all unless given")
    parser.add_argument("--write", metavar="FILE", help="writes FILE.md and FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        return child(*json.loads(arguments.child))

    report = Report(arguments)
    wanted = arguments.only or [*PARTS, "transform"]
    for name in arguments.case:
        report.say(f"\n## {CASES[name].text}")
        if {"probes", "memory"} & set(wanted):
            for reason in left_out(name, arguments.device).values():
                report.say(f"\nLeft out: {reason.split(';')[0]}.")
        for part, run in PARTS.items():
            if part in wanted and (CASES[name].norms or part not in OF_BLOCKS):
                progress(f"{name}: {part}")
                run(name, report, arguments)
    if "transform" in wanted:
        report.say("\n## Maps alone")
        transforms(report, arguments)
    report.say(f"\nLoad at the end: {load()}")
    report.write()


if __name__ == "__main__":
    main()
