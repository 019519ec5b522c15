"""The half-diagonal of the spectrum, against NumPy's transform and the published pipeline."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitprobe.models import create_model
from vitprobe.probes import Fourier, fourier
from vitprobe.probes.fourier import frequencies, half_diagonal, radial_mean, radii
from vitprobe.probes.fourier_spectrum import fourier_spectrum


class Shown(nn.Module):
    """A model whose only activation of interest, `map`, is its input: for data of the test's choice."""

    def __init__(self):
        super().__init__()
        self.map = nn.Identity()
        self.head = nn.LazyLinear(2)

    def forward(self, x):
        return self.head(self.map(x).mean((2, 3)))


def measure(x, **options):
    """`fourier` of maps `(image, channel, row, column)` themselves, in batches of three."""
    model = Shown().to(x.dtype)
    model(x)
    return fourier(model, x.split(3), layers="map", progress=False, **options).isel(layer=0)


@given(
    common=st.integers(2, 9),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 999),
)
def test_half_diagonal_is_part_of_the_full_transform(common, rows, columns, dtype, seed):
    height, width = common * rows, common * columns
    x = torch.randn(2, height, width, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    amplitude = half_diagonal(x).numpy()
    full = np.abs(np.fft.fft2(x.double().numpy(), axes=(1, 2)))
    common = math.gcd(height, width)
    count = common // 2 + 1
    expected = full[:, np.arange(count) * height // common, np.arange(count) * width // common]
    np.testing.assert_allclose(amplitude, expected, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-10)
    true = 2 * np.arange(count) * (height // common) / height  # in pi radians per patch
    np.testing.assert_allclose(frequencies((height, width)), true)


@pytest.mark.parametrize("grid", [(4, 9), (7, 1), (1, 1)])
def test_sides_without_common_divisor_are_refused(grid):
    for call in (lambda: half_diagonal(torch.zeros(1, *grid, 1)), lambda: frequencies(grid)):
        with pytest.raises(ValueError, match=f"{grid[0]}x{grid[1]} has no diagonal frequency but zero"):
            call()


def test_grids_without_diagonal_are_nan_or_an_error():
    with pytest.raises(ValueError, match=r"no unit's grid has a diagonal .* the grids are \[\(2, 3\)\]"):
        fourier(create_model("vit", image_size=(8, 12), dim=12, depth=1), torch.randn(2, 3, 8, 12), progress=False)


@pytest.mark.parametrize("side", [7, 8, 12])
def test_diagonal_wave_has_all_its_amplitude_at_its_frequency(side):
    y, x = np.mgrid[:side, :side]
    for k in range(1, side // 2 + 1):
        wave = torch.tensor(np.cos(2 * np.pi * k * (x + y) / side + 0.3))
        amplitude = half_diagonal(wave[None, :, :, None])[0, :, 0].numpy()
        nyquist = 2 * k == side
        expected = np.zeros(side // 2 + 1)
        expected[k] = side**2 * (abs(np.cos(0.3)) if nyquist else 0.5)
        np.testing.assert_allclose(amplitude, expected, atol=1e-9)
        assert frequencies((side, side))[k] == pytest.approx(2 * k / side)


def test_wave_along_one_axis_is_not_on_the_diagonal():
    wave = torch.cos(2 * math.pi * torch.arange(8.0) / 8).expand(8, 8)
    assert half_diagonal(wave[None, :, :, None]).abs().max() < 1e-4


def test_frequencies_reach_pi_where_the_grid_has_it():
    np.testing.assert_allclose(frequencies((8, 8)), [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(frequencies((7, 7)), [0, 2 / 7, 4 / 7, 6 / 7])
    np.testing.assert_allclose(frequencies((14, 7)), [0, 2 / 7, 4 / 7, 6 / 7])
    np.testing.assert_allclose(frequencies((2, 2)), [0, 1])
    # The published axis ends at "pi" whatever the map, and has no pi of even maps.
    np.testing.assert_allclose(frequencies((8, 8), definition="paper"), [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(frequencies((7, 7), definition="paper"), [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(frequencies((2, 2), definition="paper"), [0])


def published(tokens, *, prefix=0):
    """Park & Kim's pipeline as their notebook computes it, for `(image, token, channel)`: axis, log amplitudes."""
    side = math.isqrt(tokens.shape[1] - prefix)
    maps = tokens[:, prefix:].reshape(len(tokens), side, side, -1)
    spectrum = np.log(np.abs(np.fft.fft2(maps, axes=(1, 2))) + 1e-6)
    spectrum = np.roll(spectrum, (side // 2, side // 2), axis=(1, 2))
    diagonal = np.diagonal(spectrum.mean((0, 3)))
    half = diagonal[side // 2 :]
    return np.linspace(0, 1, len(half)), half


@pytest.mark.parametrize(("image_size", "side"), [(8, 4), (14, 7), (12, 6)])
def test_paper_definition_is_the_published_pipeline(image_size, side):
    model = create_model("vit", image_size=image_size, patch_size=2, dim=12, depth=2, seed=0).double().eval()
    x = torch.randn(5, 3, image_size, image_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = {}
    handles = [
        block.register_forward_hook(lambda module, args, output, i=i: tokens.update({i: output.detach().numpy()}))
        for i, block in enumerate(model.blocks)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    paper = fourier(model, x.split(2), definition="paper", progress=False)
    corrected = fourier(model, x.split(2), progress=False)
    assert paper.definition == "paper" and corrected.definition == "corrected"
    for i, layer in ((0, 2), (1, 4)):
        axis, logs = published(tokens[i], prefix=1)
        found = paper.isel(layer=layer)
        np.testing.assert_allclose(found.frequency, axis)
        np.testing.assert_allclose(found.log_amplitude, logs, rtol=1e-9)
        np.testing.assert_allclose(found.relative_log_amplitude, logs - logs[0], rtol=1e-9, atol=1e-9)
        assert float(found.high_frequency_amplitude) == pytest.approx(logs[-1] - logs[0])
        # The corrected definition has the same samples at their true frequencies, and the row at -pi as well.
        found = corrected.isel(layer=layer)
        np.testing.assert_allclose(found.log_amplitude[: len(logs)], logs, rtol=1e-9)
        np.testing.assert_allclose(found.frequency[: len(logs)], 2 * np.arange(len(logs)) / side)
        assert len(found.frequency) == len(logs) + (side % 2 == 0)
        assert float(found.highest_frequency) == pytest.approx(1 if side % 2 == 0 else 1 - 1 / side)


def test_paper_definition_knows_square_maps_only():
    model = create_model("vit", image_size=(16, 8), dim=12, depth=1)
    with pytest.raises(ValueError, match=r"knows square maps only, not 4x2: use 'corrected'"):
        fourier(model, torch.randn(2, 3, 16, 8), definition="paper", progress=False)
    assert fourier(model, torch.randn(2, 3, 16, 8), progress=False).sizes == {"layer": 3, "frequency": 2}


def test_unknown_definition_is_answered_with_the_known():
    with pytest.raises(ValueError, match=r"unknown definition 'papers'\. Did you mean 'paper'"):
        Fourier("papers")


def test_mean_and_standard_error_over_images():
    x = torch.randn(8, 5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = measure(x)
    full = np.log(np.abs(np.fft.fft2(x.numpy())) + 1e-6)
    diagonal = np.stack([full[:, :, k, k] for k in range(4)], axis=1)  # (image, frequency, channel)
    logs = diagonal.mean(-1)
    relative = logs - logs[:, :1]
    np.testing.assert_allclose(found.log_amplitude, logs.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.log_amplitude_se, logs.std(0, ddof=1) / np.sqrt(8), rtol=1e-9)
    np.testing.assert_allclose(found.relative_log_amplitude, relative.mean(0), rtol=1e-9, atol=1e-12)
    expected = relative.std(0, ddof=1) / np.sqrt(8)
    np.testing.assert_allclose(found.relative_log_amplitude_se, expected, rtol=1e-9, atol=1e-12)
    assert float(found.high_frequency_amplitude) == pytest.approx(relative[:, -1].mean())
    assert float(found.high_frequency_amplitude_se) == pytest.approx(expected[-1])


def test_geometric_mean_of_channels_and_images():
    # Amplitudes of one channel four times those of the other: their geometric mean is twice the smaller.
    wave = torch.tensor(np.cos(2 * np.pi * np.add.outer(np.arange(8), np.arange(8)) / 8))
    found = measure(torch.stack([wave, 4 * wave]).expand(2, 2, 8, 8))
    assert float(found.log_amplitude.sel(frequency=0.25)) == pytest.approx(np.log(32 * 2), abs=1e-6)


def test_grids_of_several_sizes_share_one_axis():
    found = fourier(create_model("resnet_nano", image_size=12, seed=0), torch.randn(2, 3, 12, 12), progress=False)
    assert found.grid_h.values.tolist() == [12] * 4 + [6] * 3
    np.testing.assert_allclose(found.frequency, np.arange(7) / 6)
    missing = found.log_amplitude.isnull().values
    assert not missing[:4].any()
    assert (missing[4:] == [False, True] * 3 + [False]).all()
    assert not found.high_frequency_amplitude.isnull().any()
    rows = found.log_amplitude.to_dataframe().dropna().reset_index()
    assert len(rows) == 4 * 7 + 3 * 4


def maps_of(seed=3, count=8, channels=5, grid=(6, 6)):
    return torch.randn(count, channels, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5


def test_log_of_mean_and_its_errors_are_those_of_the_means():
    x = maps_of()
    found = measure(x, average="log of mean")
    full = np.abs(np.fft.fft2(x.numpy()))
    each = np.stack([full[:, :, k, k] for k in range(4)], axis=1).mean(-1)  # (image, frequency)
    mean = each.mean(0) + 1e-6
    np.testing.assert_allclose(found.log_amplitude, np.log(mean), rtol=1e-9)
    np.testing.assert_allclose(found.log_amplitude_se, each.std(0, ddof=1) / np.sqrt(8) / mean, rtol=1e-9)
    np.testing.assert_allclose(found.relative_log_amplitude, np.log(mean / mean[0]), rtol=1e-9, atol=1e-12)
    linear = (each / mean - each[:, :1] / mean[0]).std(0, ddof=1) / np.sqrt(8)
    np.testing.assert_allclose(found.relative_log_amplitude_se, linear, rtol=1e-9, atol=1e-9)
    assert found.average == "log of mean" and measure(x).average == "mean of log"
    assert (found.log_amplitude >= measure(x).log_amplitude).all()  # Jensen


@pytest.mark.parametrize("average", ["mean of log", "log of mean"])
@pytest.mark.parametrize("along", ["diagonal", "radius"])
def test_the_change_of_high_frequencies_is_paired(average, along):
    """A unit that doubles the stream changes no relative amplitude; its standard error is not that of two means."""

    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.same = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, bias=False)
            nn.init.dirac_(self.same.weight)
            self.high = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4, bias=False)
            nn.init.constant_(self.high.weight, -1 / 8)
            with torch.no_grad():
                self.high.weight[:, :, 1, 1] = 1.0

        def forward(self, x):
            x = self.stem(x)
            x = x + self.same(x)
            return (x + self.high(x)).mean((2, 3))

    torch.manual_seed(0)
    model, x = Doubling().double(), maps_of(channels=3, grid=(8, 8))
    found = fourier(model, x.split(3), average=average, along=along, progress=False)
    change = found.high_frequency_amplitude_change.values
    assert np.isnan(change[0])
    assert change[1] == pytest.approx(0, abs=1e-5) and found.high_frequency_amplitude_change_se[1] < 1e-5
    np.testing.assert_allclose(change[1:], np.diff(found.high_frequency_amplitude), atol=1e-9)
    if along == "diagonal":  # the filter is linear: its gain at pi over that at zero, which is 1 + 0
        wave = np.zeros((8, 8))
        wave[:3, :3] = model.high.weight[0, 0].detach()
        gain = 1 + np.abs(np.fft.fft2(wave)[4, 4])
        assert change[2] == pytest.approx(np.log(gain), abs=1e-5)
        assert found.high_frequency_amplitude_change_se[2] < 1e-5


@settings(max_examples=25)
@given(rows=st.integers(2, 9), columns=st.integers(2, 9), seed=st.integers(0, 99))
def test_radial_mean_is_that_over_all_frequencies(rows, columns, seed):
    x = maps_of(seed=seed, count=2, channels=2, grid=(rows, columns))
    amplitude = np.abs(np.fft.fft2(x.numpy()))
    radius = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.fftfreq(columns)[None]) * 2
    axis = radii((rows, columns))
    found = radial_mean(torch.from_numpy(np.abs(np.fft.rfft2(x.numpy()))), (rows, columns)).numpy()
    for i, frequency in enumerate(axis):
        inside = np.round(radius / 2 * max(rows, columns)) == i
        assert frequency == pytest.approx(2 * i / max(rows, columns))
        np.testing.assert_allclose(found[..., i], amplitude[..., inside].mean(-1), rtol=1e-9)


def test_a_wave_in_any_direction_is_at_its_radius():
    side = 16
    for k, m in ((3, 0), (0, 3), (2, 2)):
        wave = torch.from_numpy(np.cos(2 * np.pi * np.add.outer(k * np.arange(side), m * np.arange(side)) / side))
        found = measure(wave.expand(2, 1, side, side), along="radius", average="log of mean")
        assert int(found.log_amplitude.argmax()) == round(math.hypot(k, m))


def test_definitions_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="definition='paper' is of the diagonal"):
        Fourier("paper", along="radius")
    with pytest.raises(ValueError, match="unknown average"):
        Fourier(average="median")
    with pytest.raises(ValueError, match="unknown along"):
        Fourier(along="rows")


@pytest.mark.parametrize("grid", [(6, 6), (5, 7), (4, 6), (7, 4)])
def test_the_plane_of_frequencies_is_numpys(grid):
    x = maps_of(grid=grid)
    found = fourier_spectrum(Shown().double(), x.split(3), layers="map", progress=False).isel(layer=0)
    logs = np.log(np.abs(np.fft.fft2(x.numpy())) + 1e-6).mean(1)
    logs = np.fft.fftshift(logs - logs[:, :1, :1], axes=(1, 2))
    np.testing.assert_allclose(found.relative_log_amplitude, logs.mean(0), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.relative_log_amplitude_se, logs.std(0, ddof=1) / np.sqrt(8), rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(found.y, np.fft.fftshift(np.fft.fftfreq(grid[0]) * grid[0]).round())
    if grid[0] == grid[1]:
        along = [float(found.relative_log_amplitude.sel(y=-k, x=-k)) for k in range(grid[0] // 2 + 1)]
        np.testing.assert_allclose(along, measure(x).relative_log_amplitude, atol=1e-9)


def test_planes_of_several_grids_have_zero_in_common():
    model = create_model("resnet_nano", image_size=12, seed=0)
    found = fourier_spectrum(model, torch.randn(2, 3, 12, 12), progress=False)
    assert (found.relative_log_amplitude.sel(y=0, x=0) == 0).all()
    assert found.relative_log_amplitude.isel(layer=-1).notnull().sum() == 36
    assert found.relative_log_amplitude.isel(layer=-1).sel(y=-3, x=2).notnull()


def test_a_batch_without_images():
    with pytest.raises(ValueError, match=r"a batch of 0 images \(0, 3, 8, 8\)"):
        fourier(create_model("vit_nano", image_size=8, seed=0), torch.zeros(0, 3, 8, 8), progress=False)
