"""A study is one figure: a grid of runs, a measurement of each, a drawing, and verdicts on published claims.

Measurements are cached by the hash of the run's configuration and of the settings that they see, so that a study which
is interrupted repeats nothing that is done. The grid goes to processes of this machine, a Dask cluster, Slurm, or any
object with `.submit(fn, *args)`.
"""

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import xarray as xr
from matplotlib.figure import Figure
from tqdm import tqdm

from vitprobe.claims import Claim, Judged, Verdict, scorecard, verdicts_from_json, verdicts_to_json
from vitprobe.executors import Task, Tasks, one_at_a_time, open_executor, wrap
from vitprobe.figures import save_figure
from vitprobe.results import cache_folder, config_hash, load, plain_name, replacing, save, stack_runs

Scale = Literal["smoke", "quick", "cpu", "paper"]
_BAD_INPUT = (  # what a user can mend in what was typed
    ValueError,
    TypeError,
    ModuleNotFoundError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_FAILED = (RuntimeError, FloatingPointError, OSError)  # what may happen to the best input: a full disk, a loss of nan


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
        workers: processes of this machine that train and measure; one per core on a CPU, one on a GPU unless given.
        executor: where the runs go: local:N, which is N workers; dask:tcp://HOST:8786 or dask:FILE.json, a Dask
            cluster; slurm:partition=NAME,hours=8,gpus=1,cpus=8,memory_gb=32, a job of each run.
        recompute: measure again (trained models are kept).
        redraw: draw and judge the saved netCDF again, and measure nothing.

    Raises:
        ValueError: if a number of anything is below one, or both of the last are asked for.
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
    executor: str | None = None
    recompute: bool = False
    redraw: bool = False

    def __post_init__(self) -> None:
        if self.recompute and self.redraw:
            raise ValueError("recompute measures again and redraw measures nothing: give one of them")
        for name in ("train_size", "test_size", "seeds", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}: give 1 or more, or leave it out for the scale's own.")


class RunLike(Protocol):
    """What a study needs to know of a run; `vitprobe.runs.Run` is one."""

    @property
    def model(self) -> str:
        """The network's name."""
        ...

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


def run_study(study: Study, settings: Settings, *, executor: Any = None) -> Path:
    """Measure every run of a study that is not measured yet, unless `settings.redraw`; then save, draw and judge.

    Args:
        study: the study.
        settings: scale, data, device, folders.
        executor: where the runs go, instead of `settings.executor`: any object with `.submit(fn, *args)`, such as a
            pool of threads, a Dask client or a submitit executor.

    Returns:
        The netCDF file; the figure and the verdicts lie beside it under the same name.

    Raises:
        RuntimeError: if a run failed; the others are kept.
        ValueError: if there is no such executor.
    """
    settings = _from_anywhere(settings)
    paper, figure = study.name.split("/")
    stem = (settings.out or Path("results") / paper) / f"{figure}_{settings.scale}"
    ds = load(stem.with_suffix(".nc")) if settings.redraw else _measured(study, settings, executor)
    verdicts = list(study.verdicts(ds))
    ds.attrs |= {"title": study.title, "study": study.name, "scale": settings.scale}
    ds.attrs["verdicts"] = verdicts_to_json(verdicts)
    path = save(ds, stem.with_suffix(".nc"))
    save_figure(study.draw(ds), stem.with_suffix(".png"))
    for verdict in verdicts:
        print(f"  {verdict.claim.id:<24} {verdict.verdict:<13} {_numbers(verdict)}")
    print(f"  {path}\n  {stem.with_suffix('.png')}")
    if verdicts:
        print(f"  {write_claims(stem.parent, settings.scale)}")
    return path


def _measured(study: Study, settings: Settings, executor: Any) -> xr.Dataset:
    """All runs of a study, those that are missing measured; fails if one of them does, and keeps the others."""
    runs = list(study.grid(settings))
    files = [_measured_file(study, run, settings) for run in runs]
    missing = {file: run for run, file in zip(runs, files, strict=True) if settings.recompute or not _loads(file)}
    print(f"{study.name} ({settings.scale}): {len(runs)} runs, {len(runs) - len(missing)} already measured")
    failures = _measure_all(study, missing, settings, executor) if missing else []
    if failures:
        run, failure = failures[0]
        error = RuntimeError(
            f"{len(failures)} of {len(runs)} runs failed, {len(runs) - len(failures)} are kept; the first, "
            f"{run.label}: {failure}. The same command goes on, and repeats nothing that is done."
        )
        error.add_note(failure.trace)
        raise error
    return stack_runs([load(file) for file in files], model=[run.model for run in runs])


def one_after_the_other(actions: Mapping[str, Callable[[], Any]]) -> None:
    """Do several things, also after some of them fail, and say at the end which did.

    Args:
        actions: what to do, by its name.

    Raises:
        RuntimeError: if some failed, for a reason that is not only what they were given.
        ValueError: if those that failed did so for what they were given.
    """
    errors: dict[str, Exception] = {}
    for name, action in actions.items():
        try:
            action()
        except BrokenPipeError:  # nobody reads what the others would print
            raise
        except Exception as error:
            if not isinstance(error, (*_BAD_INPUT, *_FAILED)):
                traceback.print_exc()
            errors[name] = error
    if errors:
        lines = [f"  {name}: {str(error) or type(error).__name__}" for name, error in errors.items()]
        text = "\n".join([f"{len(errors)} of {len(actions)} did not finish:", *lines])
        bad_input = all(isinstance(error, _BAD_INPUT) for error in errors.values())
        raise ValueError(text) if bad_input else RuntimeError(text)


def find_verdicts(folder: Path, *, deep: bool = False) -> list[Judged]:
    """The verdicts stored in the netCDF files of a folder.

    Args:
        folder: of results.
        deep: look into its folders too, at any depth.

    Returns:
        Those of each file that has some; links are relative to the folder. Files that are none of vitprobe's, or
        damaged, are left out with a line on stderr.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; run a study first, or name the folder of its results")
    found = []
    for file in sorted(folder.rglob("*.nc") if deep else folder.glob("*.nc")):
        try:
            found += _judged(file, folder)
        except (ValueError, KeyError, TypeError, OSError) as error:  # all of which a foreign file may cause
            reason = f"no {error} in it" if isinstance(error, KeyError) else error
            print(f"vitprobe: left out {file}: {reason}", file=sys.stderr)
    return found


def _judged(file: Path, folder: Path) -> list[Judged]:
    """The verdicts of one file, if it has any."""
    attributes = load(file).attrs
    if attributes.get("verdicts", "[]") == "[]":
        return []
    figure = file.with_suffix(".png")
    return [
        Judged(
            title=attributes["title"],
            scale=attributes["scale"],
            data=file.relative_to(folder).as_posix(),
            figure=figure.relative_to(folder).as_posix() if figure.is_file() else "",
            verdicts=verdicts_from_json(attributes["verdicts"]),
        )
    ]


def write_claims(
    folder: Path,
    scale: Scale,
    *,
    judged: Sequence[Judged] | None = None,
    registry: Mapping[str, Claim] | None = None,
) -> Path:
    """Write the verdicts stored in the netCDF files of a folder as a Markdown page.

    The cpu and paper scales are evidence and share `claims.md`; a small scale has its own, `claims_quick.md`.

    Args:
        folder: of results.
        scale: whose verdicts.
        judged: the verdicts, as `find_verdicts` finds them; those right in the folder unless given.
        registry: claims by their ids; those that nothing has judged are listed as not measured.

    Returns:
        The Markdown file.
    """
    evidence = scale in ("cpu", "paper")
    scales = ("cpu", "paper") if evidence else (scale,)
    path = folder / ("claims.md" if evidence else f"claims_{scale}.md")
    found = find_verdicts(folder) if judged is None else judged
    with replacing(path) as unfinished:  # of a name of its own: other studies may end at this moment
        unfinished.write_text(scorecard([one for one in found if one.scale in scales], registry))
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

    def run_typed() -> None:
        settings = tyro.cli(Settings, args=arguments, prog=f"vitprobe run {study.name}", description=study.title)
        run_study(study, settings)

    return exit_code(run_typed)


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
    except _BAD_INPUT as error:
        print(f"vitprobe: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read our output has left (`| head`): say nothing more, not at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _FAILED as error:
        print(f"vitprobe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvitprobe: interrupted; what is done is kept, and the same command goes on.", file=sys.stderr)
        return 130
    return 0


def _measured_file(study: Study, run: RunLike, settings: Settings) -> Path:
    # What the measurement may see of the settings, besides the run: how much, and on which of the images.
    sizes = {"train_size": settings.train_size, "test_size": settings.test_size}
    asked = {"scale": settings.scale} | {name: size for name, size in sizes.items() if size is not None}
    key = config_hash({"study": study.name, "run": run.config(), "settings": asked})
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


def _from_anywhere(settings: Settings) -> Settings:
    """Settings whose paths mean the same in a worker, which may stand in another folder."""
    kind, colon, paths = (settings.data or "").partition(":")
    data = settings.data
    if kind in ("folder", "npz"):
        data = kind + colon + ",".join(str(Path(path).absolute()) for path in paths.split(","))
    root, cache = settings.data_root, settings.cache
    return replace(settings, data=data, data_root=root and root.absolute(), cache=cache and cache.absolute())


@dataclass(frozen=True)
class Failure:
    """Why a run failed, as text: errors of other machines cannot always be brought back.

    Attributes:
        kind: name of the error.
        message: what it says.
        trace: where it happened.
    """

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The text of an error."""
        return cls(type(error).__name__, str(error).rstrip("."), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def _measure_run(
    measure: Callable[[Any, Settings], xr.Dataset], run: Any, settings: Settings, cache: Path, name: str
) -> xr.Dataset | Failure:
    """What a worker does for one run: nothing if another one has done it, else measure and keep it.

    Args:
        measure: of the study.
        run: the run.
        settings: of the study.
        cache: of who asks, for a worker that has none of its own.
        name: of the file in the folder of measurements.

    Returns:
        The dataset, for who asks need not share a disk with the worker.
    """
    cache = settings.cache or Path(os.environ.get("VITPROBE_CACHE") or cache)
    file = cache / "measured" / name
    try:
        with one_at_a_time():
            if settings.recompute or not _loads(file):
                save(measure(run, replace(settings, cache=cache)), file)
            return load(file)
    except Exception as error:
        return Failure.of(error)


def _measure_all(
    study: Study, missing: Mapping[Path, RunLike], settings: Settings, executor: Any
) -> list[tuple[RunLike, Failure]]:
    """Measure runs at the same time, showing how far they are; returns those that failed."""
    cache = cache_folder().absolute()
    opened: AbstractContextManager[Any] = nullcontext(executor)
    if executor is None:
        opened = _pool(settings, len(missing))
    with opened as yielded:
        tasks = wrap(yielded)
        waiting, current = deque(missing), dict[Task, Path]()
        try:
            with tqdm(total=len(missing), desc=study.name, bar_format=_BAR, disable=None) as bar:
                progress = _Progress(missing, settings.cache, bar)
                while waiting or current:
                    slots = tasks.slots()
                    while waiting and (slots is None or len(current) < slots):
                        file = waiting.popleft()
                        call = (_measure_run, study.measure, missing[file], settings, cache, file.name)
                        task = _submit(tasks, call, file.stem)
                        if isinstance(task, Failure):
                            progress.end(file, task)
                        else:
                            current[task] = file
                    ended = [task for task in current if task.done()]
                    for task in ended:
                        file = current.pop(task)
                        progress.end(file, _keep(task, file, settings.recompute))
                    progress.show(current)
                    if not ended:
                        time.sleep(tasks.poll)
        except BaseException:
            for task in current:
                with suppress(Exception):  # nobody may be there any more
                    task.cancel()
            tasks.stop()
            raise
    return [(missing[file], failure) for file, failure in progress.ended.items() if failure is not None]


def _pool(settings: Settings, runs: int) -> AbstractContextManager[Any]:
    """Where the runs go by the settings."""
    return open_executor(
        settings.executor,
        workers=settings.workers,
        runs=runs,
        device=settings.device,
        folder=(settings.cache or cache_folder()).absolute() / "jobs",
    )


def _submit(tasks: Tasks, call: Sequence[Any], key: str) -> Task | Failure:
    """A task, or why there is none; what the user can mend is raised."""
    try:
        return tasks.submit(*call, key=key)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # a queue that is full costs this run only
        return Failure.of(error)


def _keep(task: Task, file: Path, recompute: bool) -> Failure | None:
    """Save what an ended task brought, unless the worker's file is seen here; returns why it failed."""
    error = task.exception()
    outcome = Failure.of(error) if error is not None else task.result()
    if isinstance(outcome, Failure):
        return outcome
    if recompute or not _loads(file):
        save(outcome, file)
    return None


# The share of a run that counts as its training, so that measuring a trained one moves the bar too. How the two
# compare differs from study to study; the estimate of what is left mends itself as runs end.
_TRAINING = 0.9


class _Progress:
    """How far a grid of runs is.

    Args:
        runs: by the files of their measurements.
        cache: folder of trained runs, where it is seen how far each is.
        bar: of a terminal; without one there is a line for every run that ends.
    """

    def __init__(self, runs: Mapping[Path, RunLike], cache: Path | None, bar: "tqdm[Any]") -> None:
        self.runs, self.cache, self.bar = runs, cache, bar
        self.ended: dict[Path, Failure | None] = {}
        self.parts = self.first = {file: self._part(file) for file in runs}
        self.start = time.monotonic()

    def end(self, file: Path, failure: Failure | None) -> None:
        """Note that a run ended, and say so where there is no bar; failures are said anyway."""
        self.ended[file] = failure
        text = f"  [{len(self.ended)}/{len(self.runs)}] {self.runs[file].label}"
        if failure is not None:
            text += f" failed, {failure}"
        if self.bar.disable:
            print(f"{text}; {self.summary()}", flush=True)
        elif failure is not None:
            self.bar.write(text)

    def show(self, current: Mapping[Task, Path]) -> None:
        """Move the bar."""
        self.parts = self.parts | {file: self._part(file) for file in current.values()}
        if self.bar.disable:
            return
        parts = {file: self.parts[file] for file in current.values()}
        running = sum(parts[file] > 0 or task.running() for task, file in current.items())
        waiting = sum(self.parts[file] for file in self.runs if file not in self.ended)
        self.bar.n = round(len(self.ended) + waiting, 2)
        going = [f"{self.runs[file].label} {part:.0%}" for file, part in parts.items() if 0 < part < 1]
        self.bar.set_postfix_str(", ".join([self.summary(running), *going[:3]]))

    def _part(self, file: Path) -> float:
        return _TRAINING * self.runs[file].fraction(self.cache)

    def summary(self, running: int | None = None) -> str:
        """Done, running, failed and remaining time."""
        failed = sum(failure is not None for failure in self.ended.values())
        counts = [f"{len(self.ended) - failed} done"]
        counts += [f"{running} running"] if running is not None else []
        counts += [f"{failed} failed"] if failed else []
        seconds = self.remaining()
        return ", ".join(counts + ([] if seconds is None else [f"{tqdm.format_interval(seconds)} left"]))

    def remaining(self) -> float | None:
        """Seconds that the rest takes at the speed so far; `None` before there is a speed, and after the end."""
        left = sum(1 - self.parts[file] for file in self.runs if file not in self.ended)
        made = sum(
            (1.0 if file in self.ended else self.parts[file]) - self.first[file]
            for file in self.runs
            if self.ended.get(file) is None
        )
        if made <= 0 or len(self.ended) == len(self.runs):
            return None
        return left * (time.monotonic() - self.start) / made


_BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {n:.1f}/{total} runs [{elapsed}]{postfix}"


def _numbers(verdict: Verdict) -> str:
    if verdict.value != verdict.value:  # combined: the parts have the numbers
        return f"n = {verdict.n} {verdict.unit}s"
    interval = f"{verdict.value:+.3g} [{verdict.low:+.3g}, {verdict.high:+.3g}]"
    return f"{interval}, n = {verdict.n} {verdict.unit}s" + (f"; {verdict.detail}" if verdict.detail else "")
