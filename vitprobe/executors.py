"""Where the runs of a study go: processes of this machine, a Dask cluster, or Slurm.

All of them take calls by `submit` and answer with a `Task`; nothing else has to know which it is. None keeps a state
that matters: whatever is lost goes on from the folders of the runs. No torch here.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from vitprobe.names import require_device, unknown

KINDS = {
    "local": "local:N, N processes of this machine",
    "dask": "dask:ADDRESS or dask:FILE.json, a Dask scheduler such as dask:tcp://10.0.0.1:8786",
    "slurm": "slurm:partition=NAME,hours=8,gpus=1,cpus=8,memory_gb=32, a job of each run",
    "slurm-local": "slurm-local:jobs=2, the same by processes of this machine, to try it out",
}
SLURM_OPTIONS: dict[str, Callable[[str], Any]] = {
    "partition": str, "account": str, "qos": str, "constraint": str,
    "hours": float, "gpus": int, "cpus": int, "memory_gb": float, "jobs": int,
}  # fmt: skip
DEATHS = 3  # of processes while a run was under way, before the run is blamed


# --- what every executor is -------------------------------------------------------------------------


class Task:
    """A call that was submitted.

    Args:
        future: what the executor answered: anything with `done`, `result` and `cancel`.
    """

    def __init__(self, future: Any) -> None:
        self.future = future

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return bool(self.future.done())

    def running(self) -> bool:
        """Whether it is known to have begun."""
        running = getattr(self.future, "running", None)
        return bool(running is not None and running())

    def result(self) -> Any:
        """What the call returned; raises what it raised, or why it never ended."""
        return self.future.result()

    def exception(self) -> BaseException | None:
        """What `result` raises."""
        try:
            self.result()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return error
        return None

    def cancel(self) -> None:
        """Take it back; harmless once it ended."""
        self.future.cancel()


class Tasks(Protocol):
    """What takes calls.

    Attributes:
        poll: seconds between two looks at its tasks.
    """

    poll: float

    def slots(self) -> int | None:
        """How many tasks it should hold at a time; `None` for any number."""
        ...

    def submit(self, function: Callable[..., Any], *arguments: Any, key: str = "") -> Task:
        """Have a function of a module called; what has the same key is the same work."""
        ...

    def stop(self) -> None:
        """Leave nothing running after an interruption."""
        ...


class AnyExecutor:
    """An object with `.submit(fn, *args)`, such as a pool of threads.

    Args:
        executor: the object.
    """

    poll = 0.2

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def slots(self) -> int | None:
        """As many as there are."""
        return None

    def submit(self, function: Callable[..., Any], *arguments: Any, key: str = "") -> Task:
        """Hand the call on."""
        return Task(self.executor.submit(function, *arguments))

    def stop(self) -> None:
        """Who made the object stops it."""


def wrap(executor: Any) -> Tasks:
    """An executor of any maker behind `submit`: ours as they are, Dask clients, submitit's, or any other.

    Args:
        executor: an object with `.submit(fn, *args)`.

    Raises:
        TypeError: if it has no `submit`.
    """
    if isinstance(executor, (AnyExecutor, LocalExecutor, DaskExecutor, SlurmExecutor)):
        return executor
    if not callable(getattr(executor, "submit", None)):
        raise TypeError(
            f"an executor is an object with .submit(fn, *args), not a {type(executor).__name__}: "
            "pass a concurrent.futures executor, a Dask client or a submitit executor."
        )
    maker = type(executor).__module__.partition(".")[0]
    if maker == "distributed":
        return DaskExecutor(executor)
    if maker == "submitit":
        return SlurmExecutor(executor)
    return AnyExecutor(executor)


@contextlib.contextmanager
def open_executor(
    spec: str | None,
    *,
    workers: int | None = None,
    runs: int | None = None,
    device: str | None = None,
    folder: Path | None = None,
) -> Iterator[Tasks]:
    """Where runs go, by what a user types.

    Args:
        spec: `local:N`, `dask:ADDRESS`, `dask:FILE.json`, `slurm:OPTIONS` or `slurm-local:OPTIONS`; processes of this
            machine unless given.
        workers: the N of `local:N` in short.
        runs: how many there are: more processes than that are of no use.
        device: where the runs compute: on a GPU one process unless told otherwise.
        folder: for the job files and logs of Slurm, on a disk that its nodes share.

    Yields:
        An object with `submit(fn, *args)`, whose answers have `done`, `result`, `exception` and `cancel`. Leaving it
        ends the processes that it started, and no cluster.

    Raises:
        ValueError: if the kind, an option or the device is unknown, two disagree, or nobody answers at the address.
        FileNotFoundError: if there is no such scheduler file.
        ModuleNotFoundError: if a package is missing.
    """
    kind, _, rest = (spec or "local").partition(":")
    if kind not in KINDS:
        raise unknown("kind of executor", kind, KINDS.values())
    if kind != "local" and workers is not None:
        raise ValueError(f"--workers {workers} is for processes of this machine: leave it out with --executor {spec}.")
    if kind == "local":
        number = _number_of_workers(spec, rest, workers)
        require_device(device)
        wanted = number or (1 if _on_gpu(device) else cores())
        with LocalExecutor(max(1, min(wanted, runs or wanted))) as local:
            yield local
    elif kind == "dask":
        with _dask_client(rest) as client:
            yield DaskExecutor(client)
    else:
        yield _slurm(kind, rest, folder or Path("jobs"))


def _number_of_workers(spec: str | None, text: str, workers: int | None) -> int | None:
    if not text:
        number = workers
    elif text.isdecimal():
        number = int(text)
    else:
        raise ValueError(f"--executor {spec}: {text!r} is not a number of processes: use e.g. local:4.")
    if workers is not None and number != workers:
        raise ValueError(f"--executor {spec} and --workers {workers} disagree: give one of them.")
    if number is not None and number < 1:
        raise ValueError(f"{number} processes do nothing: use at least 1, e.g. --executor local:4.")
    return number


def cores() -> int:
    """The cores that this process may use, of which a container or a scheduler may have left it a few."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_gpu(device: str | None) -> bool:
    if device is not None:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _missing(package: str, kind: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"--executor {kind} needs {package}: type pip install 'vitprobe[cluster]'.")


# --- processes of this machine ----------------------------------------------------------------------


class LocalExecutor:
    """Processes of this machine, each a pool of its own, so that one that is killed costs no other its work.

    Args:
        workers: number of processes.
    """

    poll = 0.1

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Of each, which reads them when it imports torch: many small runs beside each other beat one on all cores.
        self.threads = max(1, cores() // workers)
        self.pools: list[ProcessPoolExecutor | None] = [None] * workers
        self.held: list[list[_LocalTask]] = [[] for _ in range(workers)]
        self.others: set[Any] = set()

    def __enter__(self) -> "LocalExecutor":
        self.others = set(multiprocessing.active_children())
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in filter(None, self.pools):
            pool.shutdown(cancel_futures=True)

    def slots(self) -> int | None:
        """One for each process."""
        return self.workers

    def submit(self, function: Callable[..., Any], *arguments: Any, key: str = "") -> Task:
        """Have it called by the process with the least to do."""
        self.held = [[task for task in tasks if not task.future.done()] for tasks in self.held]
        number = min(range(self.workers), key=lambda number: len(self.held[number]))
        task = _LocalTask(self, number, partial(function, *arguments))
        self.held[number].append(task)
        return task

    def start(self, number: int, call: Callable[[], Any]) -> Any:
        """The future of a call in one of the processes, which is replaced if it was killed."""
        pool = self.pools[number]
        if pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return pool.submit(call)
        context = multiprocessing.get_context("spawn")
        self.pools[number] = pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker)
        with _unless_set(OMP_NUM_THREADS=self.threads, MKL_NUM_THREADS=self.threads):
            return pool.submit(call)  # which spawns its process

    def stop(self) -> None:
        """End the processes: what they write is whole at any moment, so nobody has to be waited for."""
        for process in set(multiprocessing.active_children()) - self.others:
            process.terminate()


@contextlib.contextmanager
def _unless_set(**variables: int) -> Iterator[None]:
    """Environment variables for the length of a `with`; none if the user has set one of them, which is for all."""
    if not os.environ.keys().isdisjoint(variables):
        yield
        return
    os.environ |= {name: str(value) for name, value in variables.items()}
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


class _LocalTask(Task):
    """A call that is made again when its process was killed."""

    def __init__(self, executor: LocalExecutor, number: int, call: Callable[[], Any]) -> None:
        super().__init__(executor.start(number, call))
        self.executor, self.number, self.call = executor, number, call
        self.deaths = 0

    def done(self) -> bool:
        if not super().done() or self.future.cancelled():
            return super().done()
        if not isinstance(self.future.exception(), BrokenProcessPool):
            return True
        if self.deaths < DEATHS:
            self.deaths += 1
        if self.deaths == DEATHS:
            return True
        self.future = self.executor.start(self.number, self.call)
        return False

    def result(self) -> Any:
        try:
            return super().result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"its process was killed {self.deaths} times, perhaps for want of memory: use fewer --workers"
            ) from None


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, end with it, and give bars a lock that a terminated process does not leak."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process at once when its parent is gone: a pool's process would train on, and then wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # only spawned processes come here
    parent.join()
    os._exit(1)  # what is written is whole at any moment, as with `stop`


# --- Dask -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _dask_client(place: str) -> Iterator[Any]:
    """A client of a running scheduler; closing it leaves the cluster as it was."""
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise _missing("Dask", "dask") from None
    if not place:
        raise ValueError("--executor dask lacks an address: start `dask scheduler` and use dask:tcp://HOST:8786.")
    where: dict[str, str] = {"address": place}
    if place.endswith(".json"):
        if not Path(place).is_file():
            raise FileNotFoundError(f"no scheduler file {place}: start `dask scheduler --scheduler-file {place}`.")
        where = {"scheduler_file": place}
    try:
        client = Client(**where, set_as_default=False, name="vitprobe", timeout="10s")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no Dask scheduler answers at {place} ({type(error).__name__}): start `dask scheduler`, or look at the "
            "address that it printed."
        ) from None
    with client:
        yield client


class DaskExecutor:
    """The workers of a Dask cluster, each of which takes one run at a time.

    Args:
        client: of `distributed`, not asynchronous.
    """

    poll = 0.5

    def __init__(self, client: Any) -> None:
        self.client = client
        self.sender = Sender()
        self.workers: Mapping[str, int] = {}
        self.open: list[_DaskTask] = []
        self.told: set[str] = set()

    def slots(self) -> int | None:
        """One more than there are workers, so that none waits for us.

        Not all: whatever waits at a worker that dies is suspected of having killed it.
        """
        if self.client.status == "running":
            with contextlib.suppress(OSError):  # it reconnects by itself
                self.workers = self.client.nthreads()
        if not self.workers:
            self._tell("no workers yet: start some with `dask worker ADDRESS --nthreads 1`")
        elif max(self.workers.values()) > 1:
            self._tell("workers with several threads use them for one run at a time: see docs/many_machines.md")
        return len(self.workers) + 1

    def submit(self, function: Callable[..., Any], *arguments: Any, key: str = "") -> Task:
        """Have it called by a worker, which need not have the module that defines it."""
        parcel = self.sender.pack(function, arguments)
        # Not pure, or equal arguments would be equal work; no retries, because an error repeats itself.
        name = {"key": key} if key else {}
        future = self.client.submit(_call_on_dask, parcel, pure=False, retries=0, **name)
        task = _DaskTask(self, future)
        self.open = [*(one for one in self.open if not one.done()), task]
        return task

    def stop(self) -> None:
        """Cancelled tasks stop by themselves, and the cluster is not ours."""

    def _tell(self, note: str) -> None:
        if note not in self.told:
            self.told.add(note)
            print(f"  {note}", flush=True)


class _DaskTask(Task):
    """A Dask future: its own `exception` is None too for what was cancelled or lost."""

    def __init__(self, executor: DaskExecutor, future: Any) -> None:
        super().__init__(future)
        self.executor = executor
        self.brought: list[Any] = []

    def running(self) -> bool:
        """Not told by Dask; the oldest have begun, one on each worker."""
        begun = [task for task in self.executor.open if not task.done()][: len(self.executor.workers)]
        return self in begun

    def result(self) -> Any:
        if self.brought:
            return self.brought[0]
        if self.future.status in ("cancelled", "lost"):
            raise ConnectionError("the Dask scheduler was lost, or somebody cancelled the task")
        self.brought.append(self.future.result())
        self.future.release()  # the worker need not keep it any longer
        return self.brought[0]


def _call_on_dask(parcel: "Parcel") -> Any:
    """What a Dask worker does: Dask cannot stop a thread whose task was cancelled, so the thread stops itself."""
    from distributed import Reschedule, get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def cancelled() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state == "cancelled"

    threads = worker.state.nthreads
    try:
        with _stopped_when(cancelled):
            return call(parcel, threads=threads if threads > 1 else None)
    except _StoppedError:
        raise Reschedule from None  # nothing happens unless somebody wants it again by now


class _StoppedError(BaseException):
    """Raised in a thread whose work nobody wants any more; no Exception, so that no code of a study catches it."""


@contextlib.contextmanager
def _stopped_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Raise `_StoppedError` in this thread once a condition holds, between two steps of the interpreter."""
    thread, guard, over = threading.get_ident(), threading.Lock(), threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if condition():
                with guard:
                    if not over.is_set():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(_StoppedError)
                        )
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with guard:
            over.set()


# --- Slurm ------------------------------------------------------------------------------------------


def _slurm(kind: str, text: str, folder: Path) -> "SlurmExecutor":
    """Slurm's queue, or processes of this machine behind the same interface, with options as typed."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if name not in SLURM_OPTIONS:
            raise unknown(f"option of {kind}", name, SLURM_OPTIONS)
        try:
            options[name] = SLURM_OPTIONS[name](value)
        except ValueError:
            raise ValueError(f"--executor {kind}: {name}={value!r} is no number: use e.g. {name}=4.") from None
        if not equals or not value:
            raise ValueError(f"--executor {kind}: {part!r} has no value: use e.g. {kind}:partition=gpu,hours=8.")
        _check_size(kind, name, options[name])
    try:
        from submitit import AutoExecutor
    except ModuleNotFoundError:
        raise _missing("submitit", kind) from None
    try:
        executor = AutoExecutor(folder=folder, cluster="slurm" if kind == "slurm" else "local")
    except RuntimeError:
        raise ValueError(
            "there is no Slurm on this machine (no srun): type this on a login node, or try it out with slurm-local."
        ) from None
    cpus = options.get("cpus", 1)
    generic = {
        "name": "vitprobe",
        "timeout_min": max(1, round(60 * options.get("hours", 24))),
        "gpus_per_node": options.get("gpus", 0),
        "cpus_per_task": cpus,
        "mem_gb": options.get("memory_gb"),
    }
    if kind == "slurm":
        generic |= {
            f"slurm_{name}": options[name] for name in ("partition", "account", "qos", "constraint") if name in options
        }
    executor.update_parameters(**generic)
    # Slurm queues what it has no room for; processes of this machine would all start.
    jobs = options.get("jobs", None if kind == "slurm" else cores())
    return SlurmExecutor(executor, jobs=jobs, threads=cpus, poll=5.0 if kind == "slurm" else 0.2)


def _check_size(kind: str, name: str, value: str | float) -> None:
    """Whether a number of something can be asked for: with 0 jobs at a time a study would wait for ever."""
    least = {"jobs": 1, "cpus": 1, "gpus": 0}.get(name)
    if isinstance(value, str) or (value >= least if least is not None else 0 < value < math.inf):
        return
    wanted = "above 0" if least is None else f"of at least {least}"
    raise ValueError(f"--executor {kind}: {name}={value:g} is no number {wanted}: use e.g. {name}={least or 8}.")


class SlurmExecutor:
    """Jobs by submitit.

    Args:
        executor: of `submitit`, with its parameters.
        jobs: at most this many at a time; any number unless given.
        threads: of computation in a job; what the job's environment says unless given.
        poll: seconds between two looks: each asks the shared disk.
    """

    def __init__(
        self, executor: Any, *, jobs: int | None = None, threads: int | None = None, poll: float = 5.0
    ) -> None:
        self.executor, self.jobs, self.threads, self.poll = executor, jobs, threads, poll
        self.sender = Sender()

    def slots(self) -> int | None:
        """As many as were asked for."""
        return self.jobs

    def submit(self, function: Callable[..., Any], *arguments: Any, key: str = "") -> Task:
        """Have it called by a job of its own."""
        parcel = self.sender.pack(function, arguments)
        return _SlurmTask(self.executor.submit(_Resumable(self.threads), parcel))

    def stop(self) -> None:
        """Cancelled jobs are ended by Slurm."""


class _SlurmTask(Task):
    """A submitit job."""

    def running(self) -> bool:
        return str(self.future.state).upper().startswith("RUNNING")

    def result(self) -> Any:
        from submitit.core.utils import UncompletedJobError

        try:
            return self.future.result()
        except UncompletedJobError:  # holds the whole log
            job = self.future
            raise RuntimeError(f"job {job.job_id} left no result (it is {job.state}): see {job.paths.stderr}") from None

    def cancel(self) -> None:
        if not self.future.done():
            self.future.cancel(check=False)


class _Resumable:
    """What a job calls; a job that runs out of time is put back into the queue with the same call."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def __call__(self, parcel: "Parcel") -> Any:
        return call(parcel, threads=self.threads)

    def checkpoint(self, parcel: "Parcel") -> Any:
        """What submitit asks for before a job is put back: the run's folder holds all there is to know."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, parcel)


# --- calls that travel ------------------------------------------------------------------------------


class Source(NamedTuple):
    """A module as text."""

    text: str
    file: str
    package: bool


@dataclass(frozen=True)
class Parcel:
    """A call on its way to a machine that has vitprobe and need not have the script of the study.

    Attributes:
        sources: the modules that the script stands among, by name.
        folders: where they are from, for what is imported later, if the machine has these folders.
        main: the name that the script has there.
        pickled: function and arguments; functions and classes by the names of their modules.
    """

    sources: Mapping[str, Source]
    folders: Sequence[str]
    main: str
    pickled: bytes


class Sender:
    """Packs calls, all with the text that the modules had at the first."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self.folders: list[str] = []

    def pack(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Parcel:
        """A call as a parcel.

        Args:
            function: of a module, not defined inside another function.
            arguments: its arguments, the same.

        Raises:
            TypeError: if something is defined where another process cannot find it.
        """
        try:
            pickled = pickle.dumps((function, tuple(arguments)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the run cannot be sent to another machine: {error}; define measure and the runs at the top of a file."
            ) from None
        modules = [sys.modules[name] for name in {_module_name(thing) for thing in (function, *arguments)}]
        main = next((_name(module) for module in modules if module.__name__ == "__main__"), "")
        if main == "__main__":
            raise TypeError("the run cannot be sent to another machine: put the study into a file, and run that.")
        roots = {_root(module) for module in [*modules, *filter(None, [sys.modules.get("studies")])]}
        for root in sorted(root for root in roots if root is not None and _is_own(root)):
            if str(root) not in self.folders:
                self.folders.append(str(root))
                self.sources |= _sources(root)
        return Parcel(self.sources, self.folders, main, pickled)


def call(parcel: Parcel, *, threads: int | None = None) -> Any:
    """Unpack a parcel in a worker, and make its call while no other is made in this process.

    Args:
        parcel: what `Sender.pack` gave.
        threads: of computation; what the environment says unless given.

    Returns:
        What the call returns.
    """
    with one_at_a_time(), _threads(threads):
        _FINDER.install(parcel.sources)
        sys.path += [folder for folder in parcel.folders if folder not in sys.path and Path(folder).is_dir()]
        function, arguments = _Unpickler(io.BytesIO(parcel.pickled), parcel.main).load()
        return function(*arguments)


_ONE = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other threads of this process from training: PyTorch's random state is one for all of them."""
    while not _ONE.acquire(timeout=0.5):  # with a limit, so that a thread that waits here can be stopped
        pass
    try:
        yield
    finally:
        _ONE.release()


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Compute with so many threads, whether torch is loaded already or only now."""
    if number is None:
        yield
        return
    os.environ |= {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else number
    if torch:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(before)


class _Unpickler(pickle.Unpickler):
    """Finds what was in the script under the name that the script has here."""

    def __init__(self, file: io.BytesIO, main: str) -> None:
        super().__init__(file)
        self.main = main

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(self.main if module == "__main__" else module, name)


class _SentFinder(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports modules from the text that came with a call."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def install(self, sources: Mapping[str, Source]) -> None:
        """Make modules importable; those that were loaded with another text are forgotten, with all around them."""
        if any(self.sources.get(name) != source for name, source in sources.items()):
            self.sources |= sources
            for name in sources:
                sys.modules.pop(name, None)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.sources[fullname].package)

    def is_package(self, fullname: str) -> bool:
        return self.sources[fullname].package

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname].text

    def get_filename(self, fullname: str) -> str:
        return self.sources[fullname].file


_FINDER = _SentFinder()


def _module_name(thing: Any) -> str:
    while isinstance(thing, partial):
        thing = thing.func
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else type(thing).__module__


def _name(module: ModuleType) -> str:
    """A module's name, for a script that of its file."""
    if module.__name__ != "__main__":
        return module.__name__
    if module.__spec__ is not None:  # python -m
        return module.__spec__.name
    return Path(getattr(module, "__file__", None) or "__main__").stem


def _root(module: ModuleType) -> Path | None:
    """The folder on `sys.path` that a module is from; `None` for what is in no folder."""
    depth = _name(module).count(".")
    # Not by getattr, at which lazy modules load themselves.
    if file := vars(module).get("__file__"):
        depth += Path(file).stem == "__init__"
    elif paths := list(vars(module).get("__path__", [])):  # a package without __init__.py
        file = paths[0]
    else:
        return None
    parents = Path(file).resolve().parents
    return parents[depth] if depth < len(parents) else None


def _is_own(root: Path) -> bool:
    """Whether a folder holds code of a user's own: what is installed is installed on the workers too."""
    return root.name not in ("site-packages", "dist-packages") and root != Path(os.__file__).resolve().parent


def _sources(root: Path) -> dict[str, Source]:
    """The loaded modules of a folder as text, vitprobe itself excepted."""
    found = {}
    for module in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
        name = _name(module)
        if name.partition(".")[0] == "vitprobe" or _root(module) != root:
            continue
        file = vars(module).get("__file__")
        if file is None:
            found[name] = Source("", str(root.joinpath(*name.split("."), "__init__.py")), True)
        elif file.endswith(".py") and Path(file).is_file():
            found[name] = Source(Path(file).read_text(), str(Path(file).resolve()), "__path__" in vars(module))
    return found
