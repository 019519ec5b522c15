"""What curvature costs and how right it is, side by side in one run: vitprobe, PyHessian and what else there is.

    python tests/benchmarks/curvature.py --small        does it all run?
    python tests/benchmarks/curvature.py --data cifar10 --data-root ROOT --write results/benchmarks/curvature_cpu

For a ViT and a ConvMixer, trained here on 4,000 images and kept in --folder, and for PyHessian's own ResNet-20 if its
checkpoint is given, always with the same batches, parameters and threads, in float32, attention under the math kernel:

- solvers: the five eigenvalues of largest magnitude of the Hessian of one batch of 16: products, seconds, true
  errors. The truth is ARPACK in double precision on plain double backward. Every round takes another batch.
- product: one Hessian-vector product over two bare gradients.
- spectra: eigenvalue problems per minute; every round takes --batches other batches.
- landscape: a grid of cells over the bare forward passes, and over the published way (attention as PyTorch chooses).
- memory: the peak of a process that solves one problem over one that multiplies once.

Ratios are of seconds in the same round: median (least to most).
"""

import argparse
import copy
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import networks
import numpy as np
import peers
import torch
import torch.nn.functional as F
from networks import Network
from peers import EIGSH, PYHESSIAN, TOL, TOP, VITPROBE, Batch, DoubleBackward, Meter, Solver
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitprobe as vp
from vitprobe.probes.objective import objective
from vitprobe.results import cache_folder

PACKAGES = ("vitprobe", "torch", "numpy", "scipy", "pyhessian", "hessian-eigenthings", "curvlinops-for-pytorch")
CELLS, LANDSCAPE_BATCH = 5, 96  # cells along each direction; images, as published
GOALS = {"landscape": "at most 1.15", "memory": "at most 1.5"}


class Report:
    """What is printed, which is Markdown, and the same as numbers; both are written anew after every table."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = arguments.write
        self.lines: list[str] = []
        self.figures: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "processor": _processor(),
            "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "networks": {},
        }
        self.say("# Curvature: cost and error, side by side\n")
        self.say("Made by `tests/benchmarks/curvature.py`, which says what is measured and how to repeat it.\n")
        for key, value in list(self.figures.items())[:-1]:
            self.say(f"- {key}: {value}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def table(
        self, network: Network, part: str, figures: Any, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        self.figures["networks"].setdefault(network.name, {"text": network.describe()})[part] = figures
        self.say(f"\n### {title}\n")
        for row in (head, ["---"] * len(head), *rows):
            self.say(f"| {' | '.join(row)} |")
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


def progress(network: Network, what: str) -> None:
    print(f"  {datetime.datetime.now():%H:%M:%S} {network.name}: {what}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    median = f"{statistics.median(values):.3g}"
    return median if min(values) == max(values) else f"{median} ({min(values):.3g} to {max(values):.3g})"


def ratios(slow: Sequence[float], fast: Sequence[float]) -> str:
    return spread([a / b for a, b in zip(slow, fast, strict=False)])  # slow solvers have a first round only


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    gc.collect()
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def in_turn(actions: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each action, timed one after the other in every round, after a warm-up of each."""
    for action in actions.values():
        action()
    times = [[seconds(action, device) for action in actions.values()] for _ in range(rounds)]
    return {name: list(column) for name, column in zip(actions, zip(*times, strict=True), strict=True)}


# --- solvers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solved:
    """One problem solved by one solver.

    Attributes:
        products: Hessian-vector products.
        seconds: of everything between the network with a batch, and the pairs.
        error: largest relative error of the five values.
        residual: largest `|H v - value v| / |value|`.
    """

    products: int
    seconds: float
    error: float
    residual: float


class Judge:
    """The Hessian of one batch in double precision, and its eigenvalues of largest magnitude."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        double, exact = copy.deepcopy(model).double(), (batch[0].double(), batch[1])
        # More than wanted, so that none of the five is missed; their errors are the squares of their residuals.
        self.values, _ = peers.plain_eigsh(double, exact, Meter(), tol=1e-7, k=TOP + 3, ncv=40)
        self.hessian = DoubleBackward(double, exact)

    def errors(self, values: np.ndarray, vectors: Tensor) -> tuple[float, float]:
        """Largest relative error, each value compared with a true one of its own, and largest relative residual."""
        truth = self.values[:TOP]
        errors = np.abs(values.astype(float)[:, None] - truth) / np.abs(truth)
        residuals = []
        for value, vector in zip(values.tolist(), vectors.to(self.hessian.parameters[0]), strict=True):
            unit = vector / vector.norm()
            residuals.append(float((self.hessian.product(unit) - value * unit).norm() / abs(value)))
        return float(errors[linear_sum_assignment(errors)].max()), max(residuals)


def solve(solver: Solver, network: Network, batch: Batch, judge: Judge, most: float = math.inf) -> Solved | None:
    """One solver on a copy of the network, which some leave changed; `None` if it wants too many products."""
    progress(network, solver.name)
    model, meter, found = copy.deepcopy(network.model), Meter(most), []
    try:
        taken = seconds(lambda: found.append(solver.call(model, batch, meter, **solver.options)), network.device)
    except peers.SpentError:
        return None
    return Solved(meter.products, taken, *judge.errors(*found[0]))


def installed(solvers: Sequence[Solver], report: Report) -> list[Solver]:
    missing = {solver.package for solver in solvers if importlib.util.find_spec(solver.package) is None}
    for package in sorted(missing):
        report.say(f"\n{package} is not installed: left out.")
    return [solver for solver in solvers if solver.package not in missing]


def tightened(network: Network, batch: Batch, judge: Judge, ours: Solved, cap: int) -> Iterator[tuple[str, Solved]]:
    """PyHessian with ever smaller tolerances, until its residuals are those asked of vitprobe."""
    for solver in peers.TIGHTER:
        one = solve(solver, network, batch, judge, cap)
        if one is None:
            progress(network, f"stopped, {cap} products were not enough")
            return
        yield solver.name, one
        if one.residual <= max(TOL, ours.residual):
            return


@sdpa_kernel(SDPBackend.MATH)
def part_solvers(network: Network, arguments: argparse.Namespace, report: Report) -> None:
    solvers = installed(peers.SOLVERS, report)
    solved: dict[str, list[Solved]] = {}
    truths = []
    for number, batch in enumerate(network.batches(16, arguments.rounds)):
        progress(network, f"the truth about batch {number}")
        judge = Judge(network.model, batch)
        truths.append(judge.values.tolist())
        warm = DoubleBackward(network.model, batch, keep=False)
        warm.product(warm.start())
        for solver in solvers:
            if (number == 0 or not solver.slow) and (one := solve(solver, network, batch, judge)):
                solved.setdefault(solver.name, []).append(one)
        if number == 0 and PYHESSIAN in solvers:
            ours = solved[VITPROBE.name][0]
            solved |= {name: [one] for name, one in tightened(network, batch, judge, ours, arguments.cap)}
    base = [one.seconds for one in solved[VITPROBE.name]]
    rows = [
        [
            name,
            spread([one.products for one in found]),
            spread([one.seconds for one in found]),
            ratios([one.seconds for one in found], base),
            f"{max(one.error for one in found):.1e}",
            f"{max(one.residual for one in found):.1e}",
        ]
        for name, found in solved.items()
    ]
    figures = {"truth": truths, "solved": {name: [vars(one) for one in found] for name, found in solved.items()}}
    first = ", ".join(f"{value:.5g}" for value in truths[0][:TOP])
    title = f"{TOP} eigenvalues of one batch of 16, {len(truths)} batches (first: {first}), slow ones on the first only"
    head = ["solver", "products", "seconds", "time over vitprobe's", "largest error", "largest residual"]
    report.table(network, "solvers", figures, title, head, rows)


# --- one product, many problems -----------------------------------------------------------------------------


@sdpa_kernel(SDPBackend.MATH)
def part_product(network: Network, arguments: argparse.Namespace, report: Report) -> None:
    (batch,) = network.batches(16, 1)
    model, parameters = network.model, list(network.model.parameters())

    def two_gradients() -> None:
        for _ in range(2):
            torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), parameters)

    plain, operator = DoubleBackward(model, batch), objective(model, [batch])
    vector = plain.start()
    actions = {
        "vitprobe": lambda: operator.product(vector),
        "double backward": lambda: plain.product(vector),
        "two gradients": two_gradients,
    }
    times = in_turn(actions, max(arguments.rounds, 5), network.device)
    rows = [
        [name, spread([1e3 * one for one in taken]), ratios(taken, times["two gradients"])]
        for name, taken in times.items()
    ]
    head = ["what", "milliseconds", "over two gradients"]
    report.table(network, "product", times, "One product, its graph kept", head, rows)


@sdpa_kernel(SDPBackend.MATH)
def part_spectra(network: Network, arguments: argparse.Namespace, report: Report) -> None:
    count = arguments.batches

    def ours(model: nn.Module, batches: Sequence[Batch], stack: int) -> None:
        vp.hessian_eigenvalues(model, batches, k=TOP, tol=TOL, stack=stack, progress=False)

    def theirs(model: nn.Module, batches: Sequence[Batch], solver: Solver) -> None:
        for batch in batches:
            solver.call(model, batch, Meter(), **solver.options)

    actions = {VITPROBE.name: partial(ours, stack=1)}
    if arguments.stack > 1:
        actions[f"{VITPROBE.name}, stack={arguments.stack}"] = partial(ours, stack=arguments.stack)
    actions |= {solver.name: partial(theirs, solver=solver) for solver in installed([PYHESSIAN, EIGSH], report)}
    times: dict[str, list[float]] = {name: [] for name in actions}
    batches = network.batches(16, count * arguments.rounds)
    for first in range(0, len(batches), count):
        for name, action in actions.items():
            progress(network, f"spectra, {name}")
            call = partial(action, copy.deepcopy(network.model), batches[first : first + count])
            times[name].append(seconds(call, network.device))
    rows = [
        [name, spread([60 * count / one for one in taken]), ratios(taken, times[VITPROBE.name])]
        for name, taken in times.items()
    ]
    title = f"Spectra, {arguments.rounds} rounds of {count} batches of 16"
    head = ["solver", "problems per minute", "time over vitprobe's"]
    report.table(network, "spectra", times, title, head, rows)


# --- landscape ----------------------------------------------------------------------------------------------


def part_landscape(network: Network, arguments: argparse.Namespace, report: Report) -> None:
    batches = network.batches(LANDSCAPE_BATCH, 2 if arguments.small else 3)
    bare = "bare forward passes"

    def passes() -> None:
        with torch.no_grad():
            for images, _ in batches * CELLS**2:
                network.model(images)

    ours = partial(vp.loss_landscape, network.model, batches, points=CELLS, progress=False)
    actions: dict[str, Callable[[], Any]] = {"vitprobe": ours}
    if arguments.stack > 1:
        actions[f"vitprobe, stack={arguments.stack}"] = partial(ours, stack=arguments.stack)
    actions["the published way"] = partial(
        peers.published_landscape,
        network.model,
        network.data,
        len(batches) * LANDSCAPE_BATCH,
        cells=CELLS,
        batch_size=LANDSCAPE_BATCH,
    )
    progress(network, "landscapes")
    times = in_turn(actions | {bare: passes}, arguments.rounds, network.device)
    rows = [
        [name, spread(taken), ratios(taken, times[bare]), GOALS["landscape"] if name == "vitprobe" else ""]
        for name, taken in times.items()
    ]
    title = f"Landscape of {CELLS}x{CELLS} cells, {len(batches)} batches of {LANDSCAPE_BATCH}"
    head = ["what", "seconds", f"over {bare}", "goal"]
    report.table(network, "landscape", times, title, head, rows)


# --- memory -------------------------------------------------------------------------------------------------

IDLE, ONCE, KEPT = "libraries, network and batch alone", "one product", "one product, its graph kept"


def child(action: str, saved: str) -> None:
    """Do one thing in a process of its own and print its peak resident memory [MiB]."""
    model, batch = torch.load(saved, weights_only=False)  # written by the parent a moment ago
    solvers = {solver.name: solver for solver in (VITPROBE, EIGSH, PYHESSIAN)}
    with sdpa_kernel(SDPBackend.MATH):
        if action in solvers:
            solvers[action].call(model, batch, Meter())
        elif action != IDLE:
            hessian = DoubleBackward(model, batch, keep=action == KEPT)
            hessian.product(hessian.start())
    # Not getrusage: a child's maximum there starts at its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1024)


def part_memory(network: Network, arguments: argparse.Namespace, report: Report) -> None:
    if arguments.device != "cpu" or not Path("/proc/self/status").exists():
        report.say("\nMemory is measured on the CPU of a Linux machine only: left out.")
        return
    peaks: dict[str, float] = {}
    solvers = [solver.name for solver in installed([VITPROBE, EIGSH, PYHESSIAN], report)]
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "problem.pt")
        torch.save((network.model, network.batches(16, 1)[0]), saved)
        for action in (IDLE, ONCE, KEPT, *solvers):
            progress(network, f"memory, {action}")
            command = [sys.executable, __file__, "--child", action, saved, "--threads", str(arguments.threads)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peaks[action] = float(output.split()[-1])
    rows = [
        [
            action,
            f"{peak:.0f}",
            f"{peak - peaks[IDLE]:.0f}",
            f"{peak / peaks[ONCE]:.2f}",
            f"{peak / peaks[KEPT]:.2f}",
            GOALS["memory"] if action == VITPROBE.name else "",
        ]
        for action, peak in peaks.items()
    ]
    head = ["process", "MiB", "above the first", f"over {ONCE}", f"over {KEPT}", "goal"]
    report.table(network, "memory", peaks, "Peak memory of the whole process", head, rows)


PARTS = {
    "solvers": part_solvers,
    "product": part_product,
    "spectra": part_spectra,
    "landscape": part_landscape,
    "memory": part_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2, help="batches of 16 in one round of spectra")
    parser.add_argument("--stack", type=int, default=1, help="above 1: stacked spectra and landscapes as well")
    parser.add_argument("--cap", type=int, default=1000, help="products a tighter PyHessian may use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts; all unless given")
    parser.add_argument(
        "--networks", nargs="+", metavar="NAME", help="vit, convmixer, resnet20 (small: vit_nano, convmixer_nano)"
    )
    parser.add_argument("--data", default="digits", help="as for vitprobe.load_data; cifar10 for the real figures")
    parser.add_argument("--data-root", help="folder of torchvision's data sets")
    parser.add_argument("--folder", type=Path, help="where trained networks are kept; vitprobe's cache unless given")
    parser.add_argument("--pyhessian-resnet20", metavar="FILE", help="PyHessian's trained ResNet-20; needs CIFAR-10")
    parser.add_argument("--small", action="store_true", help="tiny networks on digits of 8x8 px, to try the script")
    parser.add_argument("--write", metavar="FILE", help="writes FILE.md and FILE.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    threadpool_limits(arguments.threads)  # ARPACK's too
    if arguments.child:
        return child(*arguments.child)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    report = Report(arguments)
    data = networks.load(small=arguments.small, spec=arguments.data, root=arguments.data_root)
    folder = arguments.folder or cache_folder() / "benchmarks" / ("small" if arguments.small else data.name)
    wanted, checkpoint = arguments.networks, arguments.pyhessian_resnet20
    found = list(networks.train(data, folder, small=arguments.small, device=arguments.device, wanted=wanted))
    if checkpoint and (not wanted or networks.RESNET20 in wanted):
        found.append(networks.pyhessian_resnet20(data, checkpoint, arguments.device))
    if not found:
        parser.error(f"--networks {' '.join(wanted)}: none of these is there, see --help")
    for network in found:
        report.say(f"\n## {network.describe()}")
        for part in arguments.only:
            PARTS[part](network, arguments, report)


if __name__ == "__main__":
    main()
