"""Grids on real executors: a Dask cluster of processes, jobs of submitit, pools; killed, interrupted, refused."""

import importlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xarray as xr

from vitprobe.executors import LocalExecutor, Sender, one_at_a_time, open_executor, wrap
from vitprobe.results import load
from vitprobe.study import Settings, run_study

NETWORKS = '''
"""A network of one's own, beside the script that trains it."""

import vitprobe as vp
from torch import nn


@vp.register
def small_sweep_net(*, image_size, channels, num_classes, dim=4):
    """Patches, a convolution, a mean."""
    patches = nn.Conv2d(channels, dim, 2, stride=2)
    return nn.Sequential(patches, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, num_classes))
'''

SWEEP = '''
"""Twelve small trainings, of which the first is long; every measurement leaves a mark."""

import os
import sys
import time
import uuid
from pathlib import Path

import torch
import networks  # registers
from matplotlib.figure import Figure

from vitprobe.runs import DataSpec, Run, trained
from vitprobe.study import Study, main
from vitprobe.training import Recipe


def grid(settings):
    data = DataSpec(spec="digits", train_size=200, test_size=20)
    epochs = lambda seed, dim: LONG if (seed, dim) == (0, 4) else 2
    return [
        Run(
            model="small_sweep_net",
            options={"dim": dim},
            data=data,
            recipe=Recipe(epochs=epochs(seed, dim), batch_size=20, warmup_epochs=0.5, seed=seed),
        )
        for seed in range(settings.seeds or 6)
        for dim in (4, 6)
    ]


def measure(run, settings):
    name = f"{run.recipe.seed}-{run.options['dim']}"
    Path(os.environ["MARKS"], f"{name}.{os.getpid()}.{uuid.uuid4().hex}").write_text(str(torch.get_num_threads()))
    if os.environ.get("BREAK") == name:
        raise ArithmeticError("this one breaks")

    def pause(model, row):
        """The long run waits in the middle, until it was killed once."""
        while row["epoch"] == 11 and name == "0-4" and not Path(os.environ["MARKS"]).with_name("go").exists():
            time.sleep(0.1)

    result = trained(run, cache=settings.cache, device="cpu", on_epoch=pause)
    weights = float(sum(p.detach().double().sum() for p in result.model.parameters()))
    seconds = " ".join(map(str, result.history.seconds.values))
    return result.history.drop_vars("seconds").assign_attrs(seconds=seconds, weights=weights, options=str(run.options))


def draw(ds):
    return Figure()


STUDY = Study("mine/sweep", "A sweep", grid, measure, draw, lambda ds: [])

if __name__ == "__main__":
    sys.exit(main(STUDY))
'''.replace("LONG", str(LONG := 20))
FIRST = "0-4"  # the long one

TOYS = '''
"""Runs that train nothing, and do as their names say."""

import os
import sys
import time
import uuid
from dataclasses import dataclass

import numpy as np
import xarray as xr

from vitprobe.results import provenance
from vitprobe.study import Study, main


@dataclass(frozen=True)
class Toy:
    model: str
    seed: int = 0

    @property
    def label(self):
        return f"{self.model} seed {self.seed}"

    def config(self):
        return {"model": self.model, "seed": self.seed}

    def fraction(self, cache):
        return 0.0


def measure(run, settings):
    marks = settings.data_root / "marks"
    mark = marks / f"{run.model}.{os.getpid()}.{uuid.uuid4().hex}"
    mark.write_text(os.environ.get("OMP_NUM_THREADS", ""))
    if not (marks / "mended").exists():
        if run.model == "breaks":
            raise ArithmeticError("it broke.")
        for _ in range(600 if run.model == "sleeps" else 0):
            time.sleep(0.1)
    values = np.random.default_rng(run.seed).normal(size=3)
    return xr.Dataset(
        {"value": ("layer", values, {"long_name": "a value", "units": "1"})},
        coords={"layer": ("layer", np.arange(3), {"long_name": "layer", "units": "1"})},
        attrs=provenance(title="toy", config=run.config(), seed=run.seed, probe="toy"),
    )


def grid(settings):
    return [Toy(name, seed) for seed, name in enumerate(settings.data.split("-"))]


def draw(ds):
    from matplotlib.figure import Figure

    return Figure()


STUDY = Study("toys/toy", "Toys", grid, measure, draw, lambda ds: [])

if __name__ == "__main__":
    sys.exit(main(STUDY))
'''


ONE_BROKE = (
    r"1 of \d runs failed, \d are kept; the first, breaks seed 1: ArithmeticError: it broke\. The same command goes on"
)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Also where the tests run in the background of a shell, which makes them, and what they start, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The script of a study with a module beside it, and a folder for marks."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.py").write_text(SWEEP)
    (folder / "networks.py").write_text(NETWORKS)
    (folder / "marks").mkdir()
    return folder


@pytest.fixture(scope="module")
def environment(folder):
    """Of a machine with one core, and not that of a test."""
    settings = {"MARKS": str(folder / "marks"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return {name: value for name, value in os.environ.items() if name not in ("VITPROBE_CACHE", "BREAK")} | settings


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A study of toys, which processes of this machine can import."""
    (tmp_path / "toys.py").write_text(TOYS)
    (tmp_path / "marks").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toys").STUDY
    del sys.modules["toys"]


@pytest.fixture
def settings(tmp_path):
    return Settings(scale="smoke", data_root=tmp_path, out=tmp_path / "out", cache=tmp_path / "cache")


def wait_for(condition, what: str, seconds: float = 90):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.02)
    return found


@pytest.fixture
def study(folder, monkeypatch):
    """The study of the script, as `vitprobe run sweep.py` finds it."""
    import torch

    from vitprobe.cli import find_study
    from vitprobe.models import registry

    monkeypatch.setenv("MARKS", str(folder / "marks"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_CONSTRUCTORS", dict(registry._CONSTRUCTORS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield find_study(str(folder / "sweep.py"))
    torch.set_num_threads(threads)
    for name in ("sweep", "networks"):
        del sys.modules[name]


def marks(folder: Path) -> list[tuple[str, int]]:
    """Which runs were measured, by which processes."""
    names = [path.name.split(".") for path in (folder / "marks").glob("*.*")]
    return sorted((name, int(process)) for name, process, _ in names)


def half_way(cache: Path) -> dict:
    """How far the long run is, once it pauses."""
    for path in cache.glob("runs/*/progress.json"):
        progress = json.loads(path.read_text())
        if progress["epochs"] == LONG and progress["epoch"] >= 10:
            return progress
    return {}


def numbers(path: Path) -> xr.Dataset:
    """A result without its times."""
    return load(path).drop_vars("seconds", errors="ignore").assign_attrs(history="")


class Inline:
    """An executor that runs at once, in this process."""

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


class Cluster:
    """A Dask scheduler and its workers, all processes of their own that talk over TCP."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.file = folder / "scheduler.json"
        self.place = ["--scheduler-file", str(self.file), "--no-dashboard"]
        self.processes: list[subprocess.Popen] = []
        self.start("scheduler", "--port", "0", "--host", "127.0.0.1")
        wait_for(self.file.is_file, "scheduler")

    def start(self, what: str, *arguments: str, **environment: str) -> subprocess.Popen:
        with open(self.folder / "cluster.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{what}", *self.place, *arguments],
                env=self.environment | environment,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def worker(self, *arguments: str, **environment: str) -> subprocess.Popen:
        place = ["--no-nanny", "--local-directory", str(self.folder / "scratch")]
        return self.start("worker", *place, *arguments, **environment)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, environment):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), environment)
    for _ in range(2):
        cluster.worker("--nthreads", "1")
    yield cluster
    cluster.close()


# --- Dask -------------------------------------------------------------------------------------------


def test_a_dask_sweep_with_a_killed_worker_is_the_local_sweep(folder, study, cluster, capsys):
    shared = Settings(scale="smoke", out=folder / "out", cache=folder / "shared", executor=f"dask:{cluster.file}")
    sweep = threading.Thread(target=run_study, args=(study, shared), daemon=True)
    sweep.start()
    at_kill = wait_for(lambda: half_way(shared.cache), "epoch of the long run")
    ((_, process),) = [mark for mark in marks(folder) if mark[0] == FIRST]
    os.kill(process, signal.SIGKILL)
    (folder / "go").touch()
    (killed,) = [worker for worker in cluster.processes if worker.pid == process]
    assert killed.wait() == -signal.SIGKILL
    sweep.join(timeout=120)
    out = capsys.readouterr().out

    # The killed run was measured by both workers, every other by one of them, once.
    _, survivor = [one.pid for one in cluster.processes if one.poll() is None]
    done = marks(folder)
    assert [mark for mark in done if mark[0] == FIRST] == sorted([(FIRST, process), (FIRST, survivor)])
    assert len({name for name, _ in done}) == 12 and len(done) == 13
    assert {path.read_text() for path in (folder / "marks").iterdir()} == {"1"}  # threads
    # Its epochs from before the kill took the time they took then: they were not trained again.
    ds = load(folder / "out" / "sweep_smoke.nc")
    seconds = [float(one) for one in ds.seconds.values[0].split()]
    assert len(seconds) == LONG and seconds[int(at_kill["epoch"]) - 1] == at_kill["seconds"]
    # Without a terminal a line for every run, and how long the rest will take.
    lines = [line for line in out.splitlines() if "/12]" in line]
    assert len(lines) == 12 and "11 done" in lines[10] and " left" in lines[10] and lines[11].endswith("12 done")

    # The same, cell by cell, as in this process with another cache.
    alone = Settings(scale="smoke", out=folder / "alone", cache=folder / "alone")
    run_study(study, alone, executor=Inline())
    assert len(marks(folder)) == 25
    xr.testing.assert_identical(numbers(shared.out / "sweep_smoke.nc"), numbers(alone.out / "sweep_smoke.nc"))


def test_ctrl_c_stops_the_tasks_and_no_cluster(toys, settings, cluster, environment, tmp_path):
    """Here of `python toys.py`, whose own name is `__main__`."""
    from distributed import Client

    options = {"data": "a-sleeps", "data-root": tmp_path, "out": settings.out, "cache": settings.cache}
    options |= {"scale": "smoke", "executor": f"dask:{cluster.file}"}
    script = subprocess.Popen(
        [sys.executable, str(tmp_path / "toys.py"), *(f"--{name}={value}" for name, value in options.items())],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(marks(tmp_path)) == 2 and list(settings.cache.glob("measured/*.nc")), "run that sleeps")
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=30)
    assert script.returncode == 130
    assert errors.strip() == "vitprobe: interrupted; what is done is kept, and the same command goes on."

    sleeper = dict(marks(tmp_path))["sleeps"]
    with Client(scheduler_file=str(cluster.file), set_as_default=False) as client:
        (address,) = [address for address, pid in client.run(os.getpid).items() if pid == sleeper]
        # Its thread is free: Dask alone would let the run go on, for a minute.
        start = time.monotonic()
        assert client.submit(os.getpid, workers=[address], pure=False).result(timeout=30) == sleeper
        assert time.monotonic() - start < 10 and not any(client.processing().values())

    (tmp_path / "marks" / "mended").touch()
    run_study(toys, replace(settings, data="a-sleeps", executor=f"dask:{cluster.file}"))
    assert [name for name, _ in marks(tmp_path)] == ["a", "sleeps", "sleeps"]


def test_a_worker_without_the_disk_sends_its_datasets(toys, settings, cluster, tmp_path, monkeypatch, capsys):
    """A worker with a cache of its own stands for a machine that shares none; it has three threads, for one run."""
    for process in cluster.processes[1:]:
        process.kill()
        process.wait()
    far, near = tmp_path / "far", tmp_path / "near"
    cluster.worker("--nthreads", "3", VITPROBE_CACHE=str(far))
    monkeypatch.setenv("VITPROBE_CACHE", str(near))
    settings = replace(settings, cache=None, data="a-breaks-b-c", executor=f"dask:{cluster.file}")
    with pytest.raises(RuntimeError, match=ONE_BROKE):
        run_study(toys, settings)
    kept = [sorted(path.name for path in cache.glob("measured/*")) for cache in (far, near)]
    assert kept[0] == kept[1] and len(kept[0]) == 3
    assert {path.read_text() for path in (tmp_path / "marks").iterdir()} == {"3"}
    assert "workers with several threads" in capsys.readouterr().out
    (tmp_path / "marks" / "mended").touch()
    result = numbers(run_study(toys, settings))
    assert [name for name, _ in marks(tmp_path)] == ["a", "b", "breaks", "breaks", "c"]
    alone = replace(settings, cache=tmp_path / "alone", executor=None)
    xr.testing.assert_identical(result, numbers(run_study(toys, alone, executor=Inline())))


def test_a_scheduler_that_is_lost_is_said(cluster, environment, tmp_path):
    scheduler = Cluster(tmp_path, environment)
    with open_executor(f"dask:{scheduler.file}") as tasks:
        task = tasks.submit(os.getpid)
        assert not task.done() and not task.running()
        scheduler.close()
        wait_for(task.done, "end")
        assert "scheduler was lost" in str(task.exception())
        task.cancel()


# --- everything else --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["local:2", "slurm-local:jobs=2,cpus=1", "threads"])
def test_a_failed_run_stops_no_other(spec, toys, settings, tmp_path, capsys):
    settings = replace(settings, data="a-breaks")
    with pytest.raises(RuntimeError, match=ONE_BROKE) as raised:
        if spec == "threads":
            run_study(toys, settings, executor=ThreadPoolExecutor(2))
        else:
            run_study(toys, replace(settings, executor=spec))
    assert "in measure" in raised.value.__notes__[0]  # where it happened, for who asks for a traceback
    assert [name for name, _ in marks(tmp_path)] == ["a", "breaks"]
    assert (os.getpid() in dict(marks(tmp_path)).values()) == (spec == "threads")
    line = next(line for line in capsys.readouterr().out.splitlines() if "failed, " in line)
    assert "breaks seed 1 failed, ArithmeticError: it broke; " in line and "1 failed" in line
    (tmp_path / "marks" / "mended").touch()
    result = numbers(run_study(toys, settings, executor=Inline()))
    assert [name for name, _ in marks(tmp_path)] == ["a", "breaks", "breaks"]
    alone = replace(settings, cache=tmp_path / "alone")
    xr.testing.assert_identical(result, numbers(run_study(toys, alone, executor=Inline())))


def test_ctrl_c_ends_the_processes_of_this_machine(toys, settings, tmp_path):
    def interrupt():
        wait_for(lambda: marks(tmp_path)[1:], "run that sleeps")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_study(toys, replace(settings, data="a-sleeps-b", executor="local:1"))
    thread.join()
    assert time.monotonic() - start < 50 and multiprocessing.active_children() == []
    assert len(list(tmp_path.glob("cache/measured/*.nc"))) == 1


def test_a_preempted_job_goes_on(toys, settings, tmp_path):
    (run,) = toys.grid(replace(settings, data="sleeps"))
    with open_executor("slurm-local:jobs=1", folder=tmp_path / "jobs") as tasks:
        task = tasks.submit(toys.measure, run, settings)
        (first,) = wait_for(lambda: marks(tmp_path), "run that sleeps")
        (tmp_path / "marks" / "mended").touch()
        os.kill(first[1], signal.SIGUSR2)  # what Slurm sends
        wait_for(task.done, "end")
        assert dict(task.result().sizes) == {"layer": 3}
        assert len(marks(tmp_path)) == 2 and first in marks(tmp_path)


def test_slurm_is_told_what_was_typed(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": "", "sbatch": f"cp $1 {tmp_path / 'job.sh'}; echo Submitted batch job 7"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    spec = "slurm:partition=gpu,account=me,hours=8,gpus=1,cpus=8,memory_gb=32,jobs=5"
    with open_executor(spec, folder=tmp_path / "jobs") as tasks:
        tasks.submit(os.getpid)
        assert tasks.slots() == 5
    lines = (tmp_path / "job.sh").read_text().splitlines()
    wanted = ["partition=gpu", "account=me", "time=480", "gpus-per-node=1", "cpus-per-task=8", "mem=32GB"]
    assert [flag for flag in wanted if f"#SBATCH --{flag}" not in lines] == []


def test_a_killed_process_costs_nobody_else_and_in_the_end_its_own_run():
    with LocalExecutor(2) as pool:
        dies = pool.submit(os.abort)
        lives = pool.submit(os.getpid)
        wait_for(lambda: [dies.done(), lives.done()] == [True, True], "end")
        assert lives.result() != os.getpid()
        with pytest.raises(RuntimeError, match="process was killed 3 times, perhaps for want of memory"):
            dies.result()


KILLED = """
import os, sys, time
from vitprobe.executors import LocalExecutor

if __name__ == "__main__":
    with LocalExecutor(2) as executor:
        tasks = [executor.submit(os.getpid) for _ in range(2)]
        while not all(task.done() for task in tasks):
            time.sleep(0.02)
        executor.submit(time.sleep, 600)  # one is at work, the other waits for work
        print(*(task.result() for task in tasks), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_processes_end_with_the_one_that_started_them(tmp_path, how):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(set(workers)) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
        parent.send_signal(how)
    wait_for(lambda: not any(running(pid) for pid in workers), "end of the processes")


def running(pid: int) -> bool:
    """Whether there is such a process that has not ended (one that nobody asked after stays as a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_threads_of_a_process_take_turns():
    inside, most = [0], [0]

    def work(_):
        with one_at_a_time():
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert most == [1]


def test_equal_runs_of_a_grid_are_measured_once(toys, settings, tmp_path):
    twice = replace(toys, grid=lambda settings: 2 * toys.grid(settings))
    assert load(run_study(twice, replace(settings, data="a"), executor=Inline())).sizes["run"] == 2
    assert len(marks(tmp_path)) == 1


def test_what_is_left_takes_the_time_that_as_much_has_taken(monkeypatch):
    from vitprobe.study import Failure, _Progress

    class Run:
        label = "run"

        def __init__(self, *fractions):
            self.fractions = list(fractions)

        def fraction(self, cache):
            return self.fractions.pop(0)

    class Bar:
        disable = True

    now = [100.0]
    monkeypatch.setattr("vitprobe.study.time.monotonic", lambda: now[0])
    # One begins in the middle, one at three quarters, one is not begun, one fails.
    runs = {Path("a"): Run(0.5), Path("b"): Run(0.75, 0.875), Path("c"): Run(0.0), Path("d"): Run(0.0)}
    progress = _Progress(runs, None, Bar())
    assert progress.remaining() is None
    now[0] = 150.0
    progress.end(Path("a"), None)
    progress.end(Path("d"), Failure("ValueError", "no", ""))
    progress.show({object(): Path("b")})
    # Training is nine tenths of a run: 0.55 + 0.1125 runs in 50 s; 0.2125 + 1 are left.
    assert progress.remaining() == pytest.approx(50 / 0.6625 * 1.2125)
    assert progress.summary(1) == "1 done, 1 running, 1 failed, 01:31 left"
    progress.end(Path("c"), None)
    assert progress.remaining() == pytest.approx(50 / 1.6625 * 0.2125)


def test_measuring_what_is_trained_already_shows_in_what_is_left(monkeypatch):
    from vitprobe.study import _Progress

    class Run:
        label = "run"

        def fraction(self, cache):
            return 1.0

    class Bar:
        disable = True

    now = [100.0]
    monkeypatch.setattr("vitprobe.study.time.monotonic", lambda: now[0])
    progress = _Progress({Path(name): Run() for name in "abcd"}, None, Bar())
    now[0] = 110.0
    progress.end(Path("a"), None)
    assert progress.remaining() == pytest.approx(30.0)


# --- what travels -----------------------------------------------------------------------------------


def test_calls_travel_with_the_modules_around_them(tmp_path, monkeypatch):
    """A package without __init__.py, as the studies of a checkout are, and a script that runs as __main__."""
    (tmp_path / "shelf" / "paper").mkdir(parents=True)
    (tmp_path / "shelf" / "paper" / "shared.py").write_text("SCALE = 10\n")
    (tmp_path / "shelf" / "paper" / "figure.py").write_text(
        "from shelf.paper.shared import SCALE\ndef measure(x):\n    return SCALE * x, __name__, __file__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shelf.paper.figure")
    first = Sender().pack(module.measure, [4])
    (tmp_path / "shelf" / "paper" / "shared.py").write_text("SCALE = 20\n")
    second = Sender().pack(module.measure, [4])
    for name in [name for name in sys.modules if name.startswith("shelf")]:
        del sys.modules[name]
    (tmp_path / "shelf").rename(tmp_path / "gone")
    code = "import pickle, sys; from vitprobe.executors import call; "
    code += "print([call(parcel) for parcel in pickle.load(sys.stdin.buffer)])"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps([first, first, second]), capture_output=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr.decode()
    rest = ("shelf.paper.figure", str(tmp_path / "shelf" / "paper" / "figure.py"))
    # A change of what it imports is noticed, and what is unchanged is not loaded again.
    assert eval(done.stdout) == [(40, *rest), (40, *rest), (80, *rest)]


def test_what_is_defined_inside_a_function_cannot_travel():
    with pytest.raises(TypeError, match=r"cannot be sent to another machine: .*define measure and the runs at the top"):
        Sender().pack(lambda: 1, [])


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("locl:2", {}, r"unknown kind of executor 'locl'.*local:N"),
        ("local:two", {}, "'two' is not a number of processes: use e.g. local:4"),
        ("local:0", {}, "0 processes do nothing"),
        ("local:2", {"workers": 3}, "--executor local:2 and --workers 3 disagree: give one of them"),
        ("dask:tcp://127.0.0.1:1", {"workers": 3}, "--workers 3 is for processes of this machine: leave it out"),
        ("dask:", {}, "lacks an address: start `dask scheduler`"),
        ("dask:nonsense://x:1", {}, "no Dask scheduler answers at nonsense://x:1"),
        ("slurm:partitoin=gpu", {}, r"unknown option of slurm 'partitoin'. Did you mean 'partition'"),
        ("slurm:hours=long", {}, "hours='long' is no number"),
        ("slurm:gpus", {}, "gpus=4"),
        ("slurm:cpus=-1", {}, "cpus=-1 is no number of at least 1: use e.g. cpus=1"),
        ("slurm-local:jobs=0", {}, "jobs=0 is no number of at least 1: use e.g. jobs=1"),
        ("slurm:hours=0", {}, "hours=0 is no number above 0: use e.g. hours=8"),
        ("slurm:memory_gb=nan", {}, "memory_gb=nan is no number above 0"),
        ("slurm:partition=gpu", {}, "no Slurm on this machine .*: type this on a login node"),
    ],
)
def test_a_sentence_says_what_to_type(spec, options, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no srun
    with pytest.raises(ValueError, match=message), open_executor(spec, folder=tmp_path, **options):
        pass


def test_a_scheduler_file_that_is_not_there(tmp_path):
    spec = f"dask:{tmp_path / 'none.json'}"
    with pytest.raises(FileNotFoundError, match="start `dask scheduler --scheduler-file"), open_executor(spec):
        pass


@pytest.mark.parametrize(("spec", "package"), [("dask:tcp://127.0.0.1:1", "distributed"), ("slurm", "submitit")])
def test_a_missing_package(spec, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vitprobe\[cluster\]'"), open_executor(spec):
        pass


def test_what_cannot_take_calls():
    with pytest.raises(TypeError, match=r"an executor is an object with \.submit\(fn, \*args\), not a dict"):
        wrap({})


def test_threads_of_local_processes_are_the_users_or_a_share_of_the_cores(monkeypatch):
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6), raising=False)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with LocalExecutor(2) as pool:
        found = [pool.submit(os.getenv, name) for name in names]
        assert not set(names) & os.environ.keys()
        wait_for(lambda: all(task.done() for task in found), "answer")
    assert [task.result() for task in found] == ["3", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with LocalExecutor(1) as pool:
        found = [pool.submit(os.getenv, name) for name in names]
        wait_for(lambda: all(task.done() for task in found), "answer")
    assert [task.result() for task in found] == ["5", None] and os.environ["OMP_NUM_THREADS"] == "5"


def test_as_many_processes_as_this_one_may_use_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    with open_executor(None, device="cpu") as local:
        assert local.workers == 3
    with pytest.raises(ValueError, match="there is no device 'gpu'"), open_executor("local:1", device="gpu"):
        pass


def test_workers_is_local_in_short():
    with open_executor("local:2", workers=2) as two, open_executor(None, workers=3, runs=2) as three:
        assert (two.workers, three.workers) == (2, 2)
