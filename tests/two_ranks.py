"""Runs the cases of a test file in two processes of one gloo group, which are started once.

A test file with cases calls `results(__file__, folder)` in a fixture, and ends with
`if __name__ == "__main__": run(CASES)`, because it is itself what the processes run.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


def results(file: str, folder: Path) -> list[dict[str, Any]]:
    """What every case gave on each rank, or the error that it raised there."""
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
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


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
