"""A study is one figure: a grid of runs, a measurement of each, a drawing, and verdicts on published claims.

Measurements are cached by the hash of the run's configuration, so that a study which is interrupted repeats nothing
that is done. The grid goes to any object with `.submit(fn, *args)`; a pool of processes is the default.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import xarray as xr
from matplotlib.figure import Figure
from tqdm import tqdm

from vitprobe.claims import Verdict, table, verdicts_from_json, verdicts_to_json
from vitprobe.figures import save_figure
from vitprobe.results import cache_folder, config_hash, load, plain_name, save, stack_runs

Scale = Literal["smoke", "quick", "cpu", "paper"]


@dataclass(frozen=True)
class Settings:
    """How big, on what and where a study runs.

    Attributes:
        scale: smoke takes seconds, quick minutes on two cores with embedded data, cpu an hour on two cores, paper a
            GPU and the papers' own settings.
        data: a data set instead of the scale's own: digits, cifar10, cifar100, svhn, fashion_mnist, folder:PATH,
            npz:TRAIN,TEST or synthetic:low.
        data_root: folder of downloaded data sets.
        train_size: use this many training images, balanced over the classes.
        test_size: use this many test images.
        download: fetch a data set that is not in its folder.
        device: cpu, cuda or cuda:1; the GPU if there is one unless given.
        seeds: number of seeds, instead of the scale's own.
        out: folder for the results; results/PAPER unless given.
        cache: folder of trained runs and measurements; $VITPROBE_CACHE or ~/.cache/vitprobe unless given.
        workers: processes that train and measure; one per core on a CPU, one on a GPU unless given.
        recompute: measure again (trained models are kept).
    """

    scale: Scale = "quick"
    data: str | None = None
    data_root: Path | None = None
    train_size: int | None = None
    test_size: int | None = None
    download: bool = True
    device: str | None = None
    seeds: int | None = None
    out: Path | None = None
    cache: Path | None = None
    workers: int | None = None
    recompute: bool = False


class RunLike(Protocol):
    """What a study needs to know of a run; `vitprobe.runs.Run` is one."""

    model: str

    @property
    def label(self) -> str:
        """The run for people."""
        ...

    def config(self) -> dict[str, Any]:
        """Everything the trained weights depend on."""
        ...

    def fraction(self, cache: Path | None) -> float:
        """How much of its training is done."""
        ...


@dataclass(frozen=True)
class Study:
    """One figure or table of a paper.

    Attributes:
        name: `paper/figure`, as in `studies/` and `results/`.
        title: what it shows.
        grid: the runs for given settings.
        measure: one run's dataset, with coordinates and attributes of its own; called in a worker process.
        draw: the figure of the stacked dataset.
        verdicts: what the stacked dataset says of the published claims; none for a figure that claims nothing.
    """

    name: str
    title: str
    grid: Callable[[Settings], Sequence[RunLike]]
    measure: Callable[[Any, Settings], xr.Dataset]
    draw: Callable[[xr.Dataset], Figure]
    verdicts: Callable[[xr.Dataset], Sequence[Verdict]]

    def __post_init__(self) -> None:
        if self.name.count("/") != 1 or not all(self.name.split("/")):
            raise ValueError(f"a study's name is 'paper/figure', where its results go, not {self.name!r}.")


def run_study(study: Study, settings: Settings, *, executor: Executor | None = None) -> Path:
    """Measure every run of a study that is not measured yet, then save, draw and judge.

    Args:
        study: the study.
        settings: scale, data, device, folders.
        executor: where the runs go: any object with `.submit(fn, *args)`; a pool of processes unless given.

    Returns:
        The netCDF file; the figure and the verdicts lie beside it under the same name.

    Raises:
        RuntimeError: if a run failed; the others are kept.
    """
    runs = list(study.grid(settings))
    files = [_measured_file(study, run, settings) for run in runs]
    missing = [(run, file) for run, file in zip(runs, files, strict=True) if settings.recompute or not _loads(file)]
    print(f"{study.name} ({settings.scale}): {len(runs)} runs, {len(runs) - len(missing)} already measured")
    failures = _measure_all(study, missing, settings, executor) if missing else []
    if failures:
        done = len(runs) - len(failures)
        raise RuntimeError(
            f"{len(failures)} of {len(runs)} runs failed, {done} are kept; the first, {failures[0][0].label}: "
            f"{type(failures[0][1]).__name__}: {failures[0][1]}"
        ) from failures[0][1]
    ds = stack_runs([load(file) for file in files], model=[run.model for run in runs])
    verdicts = list(study.verdicts(ds))
    ds.attrs |= {"title": study.title, "study": study.name, "scale": settings.scale}
    ds.attrs["verdicts"] = verdicts_to_json(verdicts)
    paper, figure = study.name.split("/")
    stem = (settings.out or Path("results") / paper) / f"{figure}_{settings.scale}"
    path = save(ds, stem.with_suffix(".nc"))
    save_figure(study.draw(ds), stem.with_suffix(".png"))
    for verdict in verdicts:
        print(f"  {verdict.claim.id:<24} {verdict.verdict:<13} {_numbers(verdict)}")
    print(f"  {path}\n  {stem.with_suffix('.png')}")
    if verdicts:
        print(f"  {write_claims(stem.parent, settings.scale)}")
    return path


def write_claims(folder: Path, scale: Scale) -> Path:
    """Write the verdicts stored in the netCDF files of a folder as a Markdown table.

    The cpu and paper scales are evidence and share `claims.md`; a small scale has its own, `claims_quick.md`.

    Args:
        folder: of results.
        scale: whose verdicts.

    Returns:
        The Markdown file.
    """
    evidence = scale in ("cpu", "paper")
    scales = ("cpu", "paper") if evidence else (scale,)
    path = folder / ("claims.md" if evidence else f"claims_{scale}.md")
    parts = [
        "# Verdicts on published claims\n\nGenerated from the datasets in this folder; a verdict holds at the scale "
        "and for the networks of its dataset.\n"
    ]
    for file in sorted(folder.glob("*.nc")):
        attributes = load(file).attrs
        if attributes.get("verdicts", "[]") != "[]" and attributes["scale"] in scales:
            parts.append(f"## {attributes['title']} ({attributes['scale']} scale, [{file.name}]({file.name}))\n")
            parts.append(table(verdicts_from_json(attributes["verdicts"])))
    temporary = path.with_suffix(".md.part")
    temporary.write_text("\n".join(parts))
    temporary.replace(path)
    return path


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Run a study from its script: `python studies/PAPER/FIGURE.py --scale quick`.

    Args:
        study: the study.
        arguments: the command line, without the program; `sys.argv` unless given.

    Returns:
        The exit code: 0, 1 for failed runs, 2 for bad input, 130 after Ctrl-C.
    """
    import tyro

    settings = tyro.cli(Settings, args=arguments, prog=f"vitprobe run {study.name}", description=study.title)
    return exit_code(lambda: run_study(study, settings))


def exit_code(action: Callable[[], Any]) -> int:
    """Run an action of the command line: one sentence instead of a traceback for what a user can mend.

    Args:
        action: what to do.

    Returns:
        The exit code: 0, 1 for failed runs, 2 for bad input, 130 after Ctrl-C.
    """
    try:
        action()
        sys.stdout.flush()
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"vitprobe: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"vitprobe: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who read our output has left (`| head`): say nothing more, not at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nvitprobe: interrupted; what is done is kept, and the same command goes on.", file=sys.stderr)
        return 130
    return 0


def _measured_file(study: Study, run: RunLike, settings: Settings) -> Path:
    key = config_hash({"study": study.name, "run": run.config()})
    return (
        (settings.cache or cache_folder()) / "measured" / f"{plain_name(study.name)}-{plain_name(run.model)}-{key}.nc"
    )


def _loads(file: Path) -> bool:
    """Whether a cached measurement is there and whole."""
    try:
        load(file)
    except (FileNotFoundError, ValueError):
        return False
    return True


def _measure_and_save(study: Study, run: Any, settings: Settings, file: Path) -> None:
    """What a worker does for one run."""
    save(study.measure(run, settings), file)


def _measure_all(
    study: Study, missing: Sequence[tuple[RunLike, Path]], settings: Settings, executor: Executor | None
) -> list[tuple[RunLike, BaseException]]:
    """Measure runs at the same time, showing how far they are; returns those that failed."""
    pool: Executor
    with _pool(settings, len(missing)) if executor is None else nullcontext(executor) as pool:
        futures: dict[Future[None], RunLike] = {
            pool.submit(_measure_and_save, study, run, settings, file): run for run, file in missing
        }
        waiting = set(futures)
        try:
            with tqdm(total=len(futures), desc=study.name, bar_format=_BAR, disable=None) as bar:
                while waiting:
                    time.sleep(0.2)
                    finished = {future for future in waiting if future.done()}
                    waiting -= finished
                    if bar.disable:  # no terminal: a line per run instead
                        for future in finished:
                            print(
                                f"  [{len(futures) - len(waiting)}/{len(futures)}] {futures[future].label}", flush=True
                            )
                    parts = [(futures[future], futures[future].fraction(settings.cache)) for future in waiting]
                    bar.n = round(len(futures) - len(waiting) + sum(part for _, part in parts), 2)
                    going = [f"{run.label} {part:.0%}" for run, part in parts if 0 < part < 1]
                    bar.set_postfix_str(", ".join(going[:3]))
        except BaseException:
            for future in futures:
                future.cancel()
            if executor is None:  # checkpoints are whole at any moment, so nobody has to be waited for
                for worker in multiprocessing.active_children():
                    worker.terminate()
            raise
    failures = [(run, future.exception()) for future, run in futures.items()]
    return [(run, error) for run, error in failures if error is not None]


_BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {n:.1f}/{total} runs [{elapsed}<{remaining}]{postfix}"


def _pool(settings: Settings, runs: int) -> ProcessPoolExecutor:
    cores = os.cpu_count() or 1
    workers = max(1, min(settings.workers or (1 if _on_gpu(settings.device) else cores), runs))
    # Spawned children read these when they import torch: many small runs beside each other beat one on all cores.
    threads = str(max(1, cores // workers))
    os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)


def _on_gpu(device: str | None) -> bool:
    if device is not None:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and give bars a lock that a terminated process does not leak."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())


def _numbers(verdict: Verdict) -> str:
    if verdict.value != verdict.value:  # combined: the parts have the numbers
        return f"n = {verdict.n} {verdict.unit}s"
    interval = f"{verdict.value:+.3f} [{verdict.low:+.3f}, {verdict.high:+.3f}]"
    return f"{interval}, n = {verdict.n} {verdict.unit}s; {verdict.detail}"
