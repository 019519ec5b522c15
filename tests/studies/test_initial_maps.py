"""The studies of initialisations: every row shows what it says."""

import numpy as np
import pytest

from studies.initial_maps import filters, gpsa, impulse
from vitprobe.study import Settings, run_study

SETTINGS = Settings(scale="smoke")


def measured(module, label: str):
    row = next(row for row in module.grid(SETTINGS) if row.label == label)
    return module.measure(row, SETTINGS).attention.values.squeeze()


def test_impulses_are_sharp_and_mimetic_heads_look_at_themselves():
    labels = ("impulse, mass 0.95", "impulse, mass 0.3", "random")
    sharp, blurred, random = (measured(impulse, label).max((1, 2)) for label in labels)
    assert sharp.min() > 0.8 and random.max() < 0.3
    assert (blurred < sharp).all() and blurred.mean() > 2 / 16
    mimetic = measured(impulse, "mimetic")
    assert mimetic[:, 2, 2].mean() > 1.2 / 16 > measured(impulse, "random")[:, 2, 2].mean() * 0.9


def test_a_stronger_locality_is_sharper():
    peaks = [measured(gpsa, f"strength {strength}").max((1, 2)).mean() for strength in ("0.5", "1", "2")]
    assert peaks[0] < peaks[1] < peaks[2]


def test_filters_have_the_norm_that_they_are_said_to_have():
    for label in ("impulse", "permutation"):
        maps = measured(filters, label)
        assert (maps > 0).sum() <= 9
        np.testing.assert_allclose(maps[maps > 0], (1 / 3) ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("module", [filters, gpsa, impulse])
def test_runs_and_draws(module, tmp_path, capsys):
    settings = Settings(scale="smoke", out=tmp_path / "out", cache=tmp_path / "cache", workers=1)

    class Here:
        """An executor in this process: spawning costs more than the study."""

        def submit(self, function, *arguments):
            from concurrent.futures import Future

            future = Future()
            future.set_result(function(*arguments))
            return future

    path = run_study(module.STUDY, settings, executor=Here())
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert not list((tmp_path / "out").glob("claims*"))
    assert "claims" not in capsys.readouterr().out
