"""Accuracy under band noise, against models whose answers are known."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitprobe import results
from vitprobe.data.band_noise import band_noise, ring, white_spectrum
from vitprobe.probes.noise import noise_by_frequency
from vitprobe.seeds import derive_seed

SIDE = 32


class OneWave(nn.Module):
    """Two classes: whether the image holds a wave of one frequency, or its negative."""

    def __init__(self, waves):
        super().__init__()
        y = torch.arange(SIDE, dtype=torch.float64)
        wave = torch.cos(2 * math.pi * waves * y / SIDE)[:, None].expand(SIDE, SIDE)
        self.register_buffer("wave", wave / wave.norm())

    def forward(self, x):
        held = (x[:, 0].double() * self.wave).sum((1, 2))
        return torch.stack([held, -held], dim=1)


def waves_and_labels(model, amplitude, count=400):
    labels = torch.arange(count) % 2
    signs = 1 - 2 * labels[:, None, None, None]
    return (amplitude * signs * model.wave).float(), labels


def measure(model, batches, **options):
    return noise_by_frequency(model, batches, progress=False, **options)


def test_a_model_of_one_frequency_falls_in_its_band_alone():
    model = OneWave(waves=8)  # 8 waves in 32 px: 0.5 pi rad/px
    amplitude, rms = 3.0, 0.5
    images, labels = waves_and_labels(model, amplitude)
    ds = measure(model, (images, labels), rms=rms)
    others = ds.frequency != 0.5
    np.testing.assert_array_equal(ds.accuracy[others], 1)
    np.testing.assert_array_equal(ds.accuracy_drop[others], 0)
    # The band's power is shared evenly by its coefficients, of which the wave has a part that is normal.
    inside = int(ring((SIDE, SIDE), 0.5).sum())
    deviation = rms * SIDE / math.sqrt(inside)
    expected = 0.5 * (1 + math.erf(amplitude / deviation / math.sqrt(2)))
    assert 0.6 < expected < 0.95
    found = ds.sel(frequency=0.5)
    assert float(found.accuracy) == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 400))
    assert float(found.accuracy_drop) == pytest.approx(1 - float(found.accuracy))
    assert ds.attrs["clean_accuracy"] == 1 and ds.attrs["clean_accuracy_se"] == 0
    assert ds.attrs["clean_nll"] == pytest.approx(math.log1p(math.exp(-2 * amplitude)), rel=1e-4)
    np.testing.assert_allclose(ds.rms, rms, rtol=1e-5)


def linear(seed=0, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(2 * 12 * 16, classes))


def images_and_labels(count=30, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, 12, 16, generator=generator)
    return images, torch.randint(3, (count,), generator=generator)


@pytest.mark.parametrize("definition", ["corrected", "paper"])
def test_against_noise_added_by_hand(definition):
    """Non-square images, two channels, two draws for each image."""
    model = linear().eval()
    images, labels = images_and_labels()
    options = {"width": 0.3, "definition": definition}
    ds = measure(model, (images, labels), frequencies=(0.4, 0.8), rms=1.5, repeats=2, seed=7, **options)
    with torch.no_grad():
        clean = (model(images).argmax(1) == labels).double()
        for frequency in (0.4, 0.8):
            right, lost, squares = [], [], []
            for repeat in range(2):
                spectrum = white_spectrum(
                    tuple(images.shape), seed=derive_seed(7, "repeat", repeat), definition=definition
                )
                noise, _ = band_noise(spectrum, frequency, rms=1.5, **options)
                logits = model(images + noise)
                right.append((logits.argmax(1) == labels).double())
                lost.append(F.cross_entropy(logits.double(), labels, reduction="none"))
                squares.append(noise.square())
            right, lost = torch.stack(right).mean(0).numpy(), torch.stack(lost).mean(0).numpy()
            drop = clean.numpy() - right
            found = ds.sel(frequency=frequency)
            for name, values in {"accuracy": right, "accuracy_drop": drop, "nll": lost}.items():
                np.testing.assert_allclose(found[name], values.mean(), rtol=1e-6)
                np.testing.assert_allclose(found[f"{name}_se"], values.std(ddof=1) / np.sqrt(30), rtol=1e-5)
            np.testing.assert_allclose(found.rms, torch.cat(squares).double().mean().sqrt(), rtol=1e-6)
    assert ds.attrs["clean_accuracy"] == pytest.approx(float(clean.mean()))
    assert float(ds.accuracy_drop_se.min()) > 0


def test_the_same_noise_in_any_batches():
    model, (images, labels) = linear(), images_and_labels()
    options = {"frequencies": (0.5, 0.9), "width": 0.3, "rms": 1.0}
    whole = measure(model, (images, labels), **options)
    pairs = [[x, y] for x, y in zip(images.split([7, 1, 22]), labels.split([7, 1, 22]), strict=True)]
    named = [{"x": x, "labels": y} for x, y in pairs]
    forward = lambda model, batch: model(batch["x"])  # noqa: E731
    for again in (measure(model, pairs, **options), measure(model, named, forward=forward, **options)):
        for name in whole.data_vars:
            np.testing.assert_allclose(again[name], whole[name], rtol=1e-6)
    other = measure(model, pairs, seed=1, **options)
    assert (other.nll != whole.nll).all()


def test_the_model_is_handed_back_as_it_was_and_says_what_was_measured():
    model = linear()
    before = torch.random.get_rng_state()
    ds = measure(model, images_and_labels(), frequencies=[0.5], width=0.3)
    assert model.training and model[1].training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    results.check(ds)
    assert ds.attrs["probe"] == "noise_by_frequency" and ds.attrs["definition"] == "corrected"
    assert ds.attrs["images"] == 30
    np.testing.assert_allclose(ds.rms, 0.2, rtol=1e-5)


def test_batches_keep_their_kind():
    class Batch(NamedTuple):
        images: torch.Tensor
        labels: torch.Tensor

    model = OneWave(4)
    images, labels = waves_and_labels(model, 30.0, 40)
    named = measure(model, [Batch(images, labels)], forward=lambda net, batch: net(batch.images))
    assert named.equals(measure(model, [(images, labels)]))


def test_half_precision_models_take_noisy_images():
    ds = measure(linear().bfloat16(), images_and_labels(), frequencies=[0.5], width=0.3)
    assert np.isfinite(ds.nll).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.rand(30, 3)}, r"class numbers of shape \(batch,\), not torch.float32 of shape \(30, 3\)"),
        ({"labels": torch.full((30,), 3)}, r"labels from 3 to 3 for a model of 3 classes"),
        ({"batches": torch.rand(2, 2, 12, 16)}, r"the batch has no targets"),
        ({"batches": []}, r"the batches were empty"),
        ({"frequencies": ()}, r"repeats=1 of 0 frequencies"),
        ({"repeats": 0}, r"repeats=0 of 1 frequencies"),
        ({"definition": "papr"}, r"unknown definition 'papr'"),
        ({"frequencies": (0.5, 0.05), "width": 0.02}, r"no frequency of an image of 12x16 px lies in 0.04 .. 0.06"),
    ],
)
def test_bad_input(change, message):
    images, labels = images_and_labels()
    options = {"frequencies": (0.5,), "width": 0.3, "batches": (images, change.pop("labels", labels)), **change}
    with pytest.raises(ValueError, match=message):
        measure(linear(), options.pop("batches"), **options)


def test_images_of_two_sizes():
    batches = [(torch.rand(2, 1, side, 8), torch.zeros(2, dtype=torch.long)) for side in (8, 12)]
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    with pytest.raises(ValueError, match=r"images of \(1, 12, 8\) after images of \(1, 8, 8\)"):
        measure(model, batches, frequencies=[0.5])


class Saying(list):
    """Batches that say what they are."""

    @property
    def description(self):
        return {"split": "test"}


def test_outputs_that_are_no_numbers_are_never_right_and_batches_say_what_they_are():
    model = OneWave(waves=8)
    ds = measure(
        model, Saying([waves_and_labels(model, 3.0, 4)]), forward=lambda model, batch: model(batch[0]) * torch.nan
    )
    assert np.isnan(ds.accuracy).all() and np.isnan(ds.attrs["clean_accuracy"])
    assert ds.attrs["split"] == "test"
