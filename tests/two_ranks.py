"""Runs the cases of a test file in two processes of one gloo group, which are started once.

A test file with cases calls `results(__file__, tmp_path_factory)` in a fixture, and ends with
`if __name__ == "__main__": run(CASES)`, because it is itself what the processes run.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

RANKS = 2


def once(name: str, make: Callable[[Path], None], factory: pytest.TempPathFactory) -> Path:
    """A folder that the first of pytest's workers to want it fills, and the others find filled."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir(exist_ok=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder


def results(file: str, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every case gave on each rank, or the error that it raised there."""
    folder = once(Path(file).stem, lambda folder: _start(file, folder), factory)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _start(file: str, folder: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(said)


def run(cases: Mapping[str, Callable[[int], Any]]) -> None:
    """One of the processes: every case with the number of the rank."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case(rank)
        except Exception as error:
            found[name] = error
        dist.barrier()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
