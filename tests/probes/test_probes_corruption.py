"""Accuracy on corrupted images, against answers that were written into the images."""

import numpy as np
import pytest
import torch
from torch import nn

from vitprobe import results
from vitprobe.data import ImageData, Split
from vitprobe.data.corruption import CORRUPTIONS, GeneratedCorruptions, corrupt, read_corruptions
from vitprobe.intervals import bootstrap_interval
from vitprobe.probes.corruption import corruption_robustness

COUNT = 40
CLASSES = 4
NAMES = ("fog", "contrast", "snow")


class Told(nn.Module):
    """Answers with the class that stands in an image's first pixel."""

    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        told = (x[:, 0, 0, 0] * 255).round().long()
        return self.sharpness * nn.functional.one_hot(told, CLASSES).to(x.dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Sets whose answers are drawn here, and which of them are right `(corruption, severity, image)`."""
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, COUNT)
    easy = rng.uniform(0.2, 1.0, COUNT)  # images differ, so that sets are not independent
    correct = rng.uniform(size=(3, 5, COUNT)) < easy * np.linspace(1, 0.5, 5)[:, None]
    told = np.where(correct, labels, (labels + 1) % CLASSES)
    for name, answers in zip(NAMES, told, strict=True):
        images = np.zeros((5 * COUNT, 4, 4, 3), np.uint8)
        images[:, 0, 0, 0] = answers.ravel()
        np.save(folder / f"{name}.npy", images)
    np.save(folder / "labels.npy", np.tile(labels, 5))
    return read_corruptions(folder, mean=(0.0,) * 3, std=(1.0,) * 3), correct


def measure(source, model=None, **options):
    return corruption_robustness(model or Told(), source, types=options.pop("types", NAMES), progress=False, **options)


def test_accuracy_of_known_answers(stored):
    source, correct = stored
    ds = measure(source, batch_size=7)
    assert ds.corruption_name.values.tolist() == list(NAMES)
    assert ds.group.values.tolist() == ["weather", "digital", "weather"]
    assert ds.severity.values.tolist() == [1, 2, 3, 4, 5]
    share = correct.mean(-1)
    np.testing.assert_allclose(ds.accuracy, share)
    np.testing.assert_allclose(ds.accuracy_se, correct.std(-1, ddof=1) / np.sqrt(COUNT))
    right, wrong = np.log(np.exp(2) + 3) - np.array([2, 0])
    losses = np.where(correct, right, wrong)
    np.testing.assert_allclose(ds.nll, losses.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(ds.nll_se, losses.std(-1, ddof=1) / np.sqrt(COUNT), rtol=1e-6)
    assert ds.attrs["images"] == COUNT and "mce" not in ds.attrs


def test_the_mean_has_an_interval_over_images(stored):
    source, correct = stored
    attributes = measure(source).attrs
    by_image = correct.mean((0, 1))
    assert attributes["mean_accuracy"] == pytest.approx(correct.mean())
    assert attributes["mean_accuracy_se"] == pytest.approx(by_image.std(ddof=1) / np.sqrt(COUNT))
    _, low, high = bootstrap_interval(by_image, np.mean, seed=0, resamples=3000)
    assert attributes["mean_accuracy_low"] == pytest.approx(low, abs=0.01)
    assert attributes["mean_accuracy_high"] == pytest.approx(high, abs=0.01)
    # sets of the same images are not independent: taking them so would give a smaller error
    independent = np.sqrt((correct.std(-1, ddof=1) ** 2 / COUNT).sum()) / 15
    assert attributes["mean_accuracy_se"] > 1.5 * independent


def test_mean_corruption_error_by_hand(stored):
    source, correct = stored
    reference = {"fog": 0.5, "contrast": 0.8, "snow": 0.25, "frost": 0.9}
    ds = measure(source, reference_error=reference, severities=(2, 4))
    errors = 1 - correct[:, [1, 3]].mean((1, 2))
    relative = errors / [0.5, 0.8, 0.25]
    np.testing.assert_allclose(ds.relative_error, relative)
    assert ds.attrs["mce"] == pytest.approx(relative.mean())
    by_image = ((1 - correct[:, [1, 3]].mean(1)) / np.array([[0.5], [0.8], [0.25]])).mean(0)
    assert ds.attrs["mce_se"] == pytest.approx(by_image.std(ddof=1) / np.sqrt(COUNT))
    assert ds.attrs["mce_low"] < ds.attrs["mce"] < ds.attrs["mce_high"]


def test_a_model_relative_to_itself_is_one(stored):
    source, _ = stored
    own = measure(source)
    ds = measure(source, types=("snow", "fog"), severities=(1, 5), reference_error=own)
    np.testing.assert_allclose(ds.relative_error, 1)
    assert ds.attrs["mce"] == pytest.approx(1)


def test_runs_on_other_corruptions_are_stacked_by_name(stored):
    source, correct = stored
    runs = results.stack_runs([measure(source, types=("fog", "snow")), measure(source, types=("snow", "contrast"))])
    for run, name, row in [(0, "fog", 0), (0, "snow", 2), (1, "snow", 2), (1, "contrast", 1)]:
        of_run = runs.isel(run=run)
        place = int(np.flatnonzero(of_run.corruption_name.values == name)[0])
        np.testing.assert_allclose(of_run.accuracy[place], correct[row].mean(-1))
    assert int(np.isfinite(runs.accuracy).sum()) == 4 * 5


def test_a_data_set_is_corrupted_on_the_fly():
    pytest.importorskip("imagecorruptions")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (16, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(pixels, torch.arange(16) % 4)
    data = ImageData("made", "made", split, split, tuple("abcd"), (0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))
    ds = corruption_robustness(model, data, types=["speckle_noise"], severities=[3], batch_size=5, progress=False)
    raw = corrupt(data.test.images.permute(0, 2, 3, 1).numpy(), "speckle_noise", 3)
    x = torch.from_numpy((raw / 255 - np.array(data.mean)) / np.array(data.std)).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = (model(x).argmax(1) == data.test.labels).double().mean()
    np.testing.assert_allclose(ds.accuracy, expected)
    assert "imagecorruptions-imaug" in ds.attrs["config"]
    other = GeneratedCorruptions(data, seed=1)
    again = corruption_robustness(model, other, types=["speckle_noise"], severities=[3], progress=False)
    assert (again.nll != ds.nll).all()


def test_the_model_is_handed_back_as_it_was(stored):
    model = Told().train()
    before = torch.random.get_rng_state()
    ds = measure(stored[0], model)
    assert model.training and model.sharpness.grad is None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert ds.attrs["probe"] == "corruption_robustness"
    assert all(array.attrs["long_name"] and array.attrs["units"] for array in ds.data_vars.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"types": None}, ValueError, "unknown corruption 'gaussian_noise'"),
        ({"types": "fog"}, ValueError, "types='fog' .* give lists"),
        ({"types": ["fog", "fog"]}, ValueError, "each once"),
        ({"severities": ()}, ValueError, "give lists of one or more"),
        ({"severities": (0, 1)}, ValueError, "severity 0 is not one of 1, 2, 3, 4, 5"),
        ({"reference_error": {"fog": 0.5}}, ValueError, "lacks contrast, snow"),
        ({"reference_error": dict.fromkeys(CORRUPTIONS, 80.0)}, ValueError, "not percentages"),
        ({"source": "CIFAR-10-C"}, TypeError, r"source is a str: give a data set, or .*read_corruptions\('CIFAR-10-C'"),
    ],
)
def test_bad_input(stored, options, error, message):
    source = options.pop("source", stored[0])
    with pytest.raises(error, match=message):
        measure(source, **options)


def test_a_reference_that_was_measured_on_other_sets(stored):
    own = measure(stored[0], types=("fog",), severities=(1,))
    for options in ({"types": ("snow",), "severities": (1,)}, {"types": ("fog",), "severities": (2,)}):
        with pytest.raises(ValueError, match="reference_error was not measured on"):
            measure(stored[0], reference_error=own, **options)


def test_labels_of_other_classes(stored):
    with pytest.raises(ValueError, match=r"labels from 0 to 3 for a model of 2 classes"):
        measure(stored[0], nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)))


def test_outputs_that_are_no_numbers_are_never_right(stored):
    class Overflowing(Told):
        def forward(self, x):
            return super().forward(x) / (x.mean((1, 2, 3)) != x.mean((1, 2, 3)).max())[:, None]

    ds = measure(stored[0], Overflowing(), types=NAMES[:1], severities=(1,))
    assert np.isnan(ds.accuracy).all() and np.isnan(ds.nll).all()
    assert all(np.isnan(ds.attrs[f"mean_accuracy{end}"]) for end in ("", "_se", "_low", "_high"))
