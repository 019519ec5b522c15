"""The smoke run that tests of studies share."""

from concurrent.futures import Future
from dataclasses import replace

import pytest


class Here:
    """An executor in this process: spawning costs more than a study at this size."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def smoke_run(tmp_path, capsys):
    """Run a study with one seed of 50 images, in folders of the test's own; gives its netCDF file."""
    from vitprobe.study import Settings, run_study

    settings = Settings(
        scale="smoke",
        train_size=50,
        test_size=30,
        seeds=1,
        out=tmp_path / "out",
        cache=tmp_path / "cache",
        device="cpu",
    )
    return lambda study, **changes: run_study(study, replace(settings, **changes), executor=Here())
