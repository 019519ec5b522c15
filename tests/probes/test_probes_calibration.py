"""Calibration: cases by hand, the published code's bins, scikit-learn's scores, and the fit of the temperature."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, top_k_accuracy_score
from torch import nn

from vitprobe import load_data
from vitprobe.models import create_model
from vitprobe.probes import Fourier, fourier, probe
from vitprobe.probes.calibration import Calibration, calibration
from vitprobe.results import check, load, save, stack_runs

ERRORS = ("ece", "ece_low", "ece_high", "ecse", "ecse_low", "ecse_high")


class Shown(nn.Module):
    """A model whose logits are the channels of its images."""

    def forward(self, x):
        return x.flatten(1)


def as_images(logits):
    return logits[:, :, None, None]


def measure(logits, targets, *, split=10**6, resamples=50, **options):
    """The dataset for given logits `(image, class)`."""
    batches = list(zip(as_images(logits).split(split), targets.split(split), strict=True))
    return calibration(Shown(), batches, resamples=resamples, progress=False, **options)


def two_classes(confidence, right):
    """Logits of two classes with given confidences, and labels that are or are not the surer class."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    logits = torch.stack([confidence.log(), (1 - confidence).log()], dim=1)
    return logits, 1 - torch.as_tensor(right).long()


def drawn(count, classes, *, temperature=1.0, scale=2.0, seed=0):
    """Logits `temperature` times too large (or small) for the labels, which are drawn from their distribution."""
    rng = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, classes, generator=rng, dtype=torch.float64)
    return temperature * logits, torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]


def number(ds, name):
    return float(ds[name])


# --- by hand ----------------------------------------------------------------------------------------


def test_a_calibrated_model_by_hand():
    ds = measure(*two_classes([0.75] * 4, [1, 1, 1, 0]))
    assert ds.share.values.tolist() == [0.0] * 7 + [1.0] + [0.0] * 2
    assert (ds.bin_low[7], ds.bin_high[7]) == (pytest.approx(0.7), pytest.approx(0.8))
    assert ds.bin_accuracy[7] == 0.75
    assert ds.bin_confidence[7] == pytest.approx(0.75, abs=1e-15)
    assert np.isnan(ds.bin_accuracy.values[:7]).all()
    assert np.isnan(ds.bin_confidence.values[:7]).all()
    assert (ds.share_correct[7], ds.share_wrong[7]) == (0.75, 0.25)
    assert number(ds, "ece") == pytest.approx(0, abs=1e-15)
    assert number(ds, "ecse") == pytest.approx(0, abs=1e-15)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert number(ds, "nll") == pytest.approx(entropy)
    assert number(ds, "entropy") == pytest.approx(entropy)
    assert number(ds, "brier") == pytest.approx(0.75 * 2 * 0.25**2 + 0.25 * 2 * 0.75**2)
    assert number(ds, "top1") == 0.75
    assert number(ds, "temperature") == pytest.approx(1, abs=1e-9)
    assert number(ds, "nll_scaled") == pytest.approx(entropy)
    assert "top5" not in ds
    # binomial, with images - 1: 0.75 * 0.25 / 3
    assert number(ds, "top1_se") == ds.bin_accuracy_se[7] == 0.25
    assert ds.bin_confidence_se[7] == pytest.approx(0, abs=1e-15)


def test_an_over_and_an_under_confident_bin_by_hand():
    ds = measure(*two_classes([0.75, 0.77, 0.95, 0.97], [1, 1, 1, 0]))
    # (0.7, 0.8]: right twice, 0.76 sure; (0.9, 1]: right once, 0.96 sure
    assert ds.bin_accuracy.values[[7, 9]].tolist() == [1.0, 0.5]
    np.testing.assert_allclose(ds.bin_confidence[[7, 9]], [0.76, 0.96])
    np.testing.assert_allclose(ds.bin_confidence_se[[7, 9]], 0.01)
    assert number(ds, "ece") == pytest.approx((0.24 + 0.46) / 2)
    assert number(ds, "ecse") == pytest.approx((-0.24 + 0.46) / 2)
    assert (number(ds, "acc_90"), number(ds, "unc_90"), number(ds, "freq_90")) == (0.5, 0.0, 0.5)
    # Wilson's interval of 2 of 2 is (n / (n + z^2), 1)
    z = 1.959963984540054
    assert ds.bin_accuracy_low[7] == pytest.approx(2 / (2 + z**2))
    assert ds.bin_accuracy_high[7] == pytest.approx(1)


def test_what_is_said_of_confident_and_of_wrong_predictions():
    ds = measure(*two_classes([0.95, 0.95, 0.95, 0.95, 0.6, 0.6, 0.6, 0.6], [1, 1, 1, 0, 0, 0, 1, 1]))
    assert number(ds, "acc_90") == 0.75
    assert number(ds, "unc_90") == pytest.approx(2 / 3)
    assert number(ds, "freq_90") == 0.5
    assert number(ds, "acc_90_se") == 0.25
    unsure = measure(*two_classes([0.6, 0.7], [1, 1]))
    assert np.isnan([number(unsure, "acc_90"), number(unsure, "unc_90")]).all()


def saturated(right, images=100):
    logits = torch.zeros(images, 10)
    logits[:, 3] = 1000.0
    return logits, torch.where(torch.arange(images) < right, 3, 4)


def test_saturated_predictions_count_once_and_in_the_paper_not_at_all():
    """The published code's tell-tale: always sure and hardly ever right, its ECE is the accuracy."""
    corrected, paper = (measure(*saturated(1), definition=d) for d in ("corrected", "paper"))
    assert number(corrected, "ece") == pytest.approx(0.99)
    assert number(corrected, "ecse") == pytest.approx(0.99)
    assert number(paper, "ece") == pytest.approx(0.01)
    assert number(paper, "ecse") == pytest.approx(-0.01)
    assert paper.share[9] == corrected.share[9] == 1
    assert (paper.bin_confidence[9], corrected.bin_confidence[9]) == (0, 1)
    always_wrong = measure(*saturated(0))
    assert [number(always_wrong, name) for name in ERRORS] == [1.0] * 6
    assert number(measure(*saturated(0), definition="paper"), "ece") == 0


def published_errors(logits, labels, bins):
    """ECE and ECSE with the published code's two kinds of bin, bin by bin, in single precision."""
    probabilities = F.softmax(logits.float(), dim=1).numpy()
    confidence, right = probabilities.max(1).astype(float), probabilities.argmax(1) == labels.numpy()
    edges = np.linspace(0.0, 1.0, bins + 1)
    ece = ecse = 0.0
    for low, high in pairwise(edges):
        counted = (confidence > low) & (confidence <= high)
        if not counted.any():
            continue
        mean_confidence = confidence[(confidence >= low) & (confidence < high)].sum() / counted.sum()
        gap = mean_confidence - right[counted].mean()
        ece, ecse = ece + abs(gap) * counted.mean(), ecse + gap * counted.mean()
    return ece, ecse


@settings(max_examples=12)
@given(
    count=st.integers(1, 40),
    classes=st.integers(2, 7),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    bins=st.sampled_from([1, 2, 10, 15]),
    seed=st.integers(0, 999),
)
def test_paper_definition_is_the_published_codes_bins(count, classes, scale, bins, seed):
    """A scale of zero puts every confidence on 1/classes, at times an edge; a large one saturates single precision."""
    logits, labels = drawn(count, classes, scale=scale, seed=seed)
    ds = measure(logits, labels, definition="paper", bins=bins, resamples=2)
    assert (number(ds, "ece"), number(ds, "ecse")) == pytest.approx(published_errors(logits, labels, bins), abs=1e-12)


# --- against scikit-learn ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """A trained network, its scikit-learn original, and the test images and labels of the digits."""
    data = load_data("digits")
    train, test = ((split.images.flatten(1) / 255.0, split.labels) for split in (data.train, data.test))
    fitted = LogisticRegression(C=100, max_iter=200).fit(*map(np.asarray, train))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.from_numpy(fitted.coef_))
        model[1].bias.copy_(torch.from_numpy(fitted.intercept_))
    return model, fitted, test[0].double().reshape(-1, 1, 8, 8), test[1]


def test_a_trained_network_has_the_scores_scikit_learn_gives_it(digits):
    model, fitted, images, labels = digits
    batches = list(zip(images.split(50), labels.split(50), strict=True))
    ds = calibration(model, batches, progress=False, resamples=200)
    probabilities = fitted.predict_proba(images.flatten(1).numpy())
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels.numpy()
    truth, predicted = calibration_curve(right, confidence, n_bins=10)
    seen = ds.share.values > 0
    assert seen.sum() >= 5
    np.testing.assert_allclose(ds.bin_accuracy[seen], truth)
    np.testing.assert_allclose(ds.bin_confidence[seen], predicted)
    gaps = predicted - truth
    assert number(ds, "ece") == pytest.approx(np.abs(gaps) @ ds.share.values[seen])
    assert number(ds, "ecse") == pytest.approx(gaps @ ds.share.values[seen])
    assert number(ds, "ecse") == pytest.approx(confidence.mean() - right.mean())
    assert number(ds, "nll") == pytest.approx(log_loss(labels, probabilities))
    assert number(ds, "top1") == pytest.approx(accuracy_score(labels, probabilities.argmax(1)))
    assert number(ds, "top5") == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5))
    each = np.square(probabilities - np.eye(10)[labels]).sum(1)
    assert number(ds, "brier") == pytest.approx(each.mean())
    assert number(ds, "brier_se") == pytest.approx(each.std(ddof=1) / math.sqrt(len(each)))
    # Trained with little regularisation it is too sure, which a temperature above 1 mends.
    assert number(ds, "ecse_low") > 0
    assert number(ds, "temperature_low") > 1
    assert number(ds, "nll_scaled") < number(ds, "nll")
    assert number(ds, "ece_scaled") < number(ds, "ece")


def test_brier_score_of_two_classes_is_twice_scikit_learns():
    logits, labels = drawn(50, 2)
    expected = 2 * brier_score_loss(labels, logits.softmax(1)[:, 1])
    assert number(measure(logits, labels), "brier") == pytest.approx(expected)


# --- temperature ------------------------------------------------------------------------------------


def by_search(logits, labels):
    """The temperature of the smallest NLL, by a bounded search on the logits themselves."""

    def nll(logarithm):
        return float(F.cross_entropy(logits / math.exp(logarithm), labels))

    return math.exp(minimize_scalar(nll, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)


@pytest.mark.parametrize(("classes", "temperature"), [(2, 0.4), (10, 1.0), (10, 3.0), (200, 2.0)])
def test_temperature_and_what_is_measured_at_it_are_those_of_scaled_logits(classes, temperature):
    logits, labels = drawn(400, classes, temperature=temperature, scale=3.0)
    ds = measure(logits, labels, split=150)
    best = by_search(logits, labels)
    assert number(ds, "temperature") == pytest.approx(best, rel=1e-6)
    scaled = measure(logits / best, labels)
    assert number(scaled, "temperature") == pytest.approx(1, rel=1e-6)
    for name in ("nll", "nll_se", *ERRORS):
        stem, *ending = name.split("_")
        at_best = number(ds, "_".join([f"{stem}_scaled", *ending]))
        assert at_best == pytest.approx(number(scaled, name), abs=1e-6), name


def test_temperature_of_many_images_is_the_one_their_labels_were_drawn_at():
    for true in (0.5, 2.5):
        ds = measure(*drawn(20_000, 10, temperature=true), split=5_000, resamples=2)
        low, high = number(ds, "temperature_low"), number(ds, "temperature_high")
        assert low < true < high
        assert high / low < 1.1
        assert number(ds, "ece_scaled") < 0.02 < 0.1 < number(ds, "ece")


def test_interval_of_the_temperature_is_that_of_refits_to_resampled_images():
    logits, labels = drawn(300, 5, temperature=2.0)
    ds = measure(logits, labels)
    rng = np.random.default_rng(0)
    refits = []
    for _ in range(200):
        index = torch.from_numpy(rng.integers(0, 300, 300))
        refits.append(math.log(by_search(logits[index], labels[index])))
    half_width = math.log(number(ds, "temperature_high") / number(ds, "temperature_low")) / 2
    # 200 refits know their spread to 5 %.
    assert half_width == pytest.approx(1.97 * np.std(refits, ddof=1), rel=0.2)


@pytest.mark.parametrize(
    ("logits", "labels", "temperature"),
    [
        (torch.eye(10) * 5, torch.arange(10), 1 / 20),  # always right: the surer the better
        (torch.eye(10) * 5, torch.arange(10).roll(1), 20),  # always wrong: the less sure the better
        (torch.zeros(10, 10), torch.arange(10), 1),  # knows nothing: it does not matter
        (torch.eye(10) * 1e4, torch.arange(10), 1),  # right beyond any doubt: nor here
    ],
)
def test_temperature_without_a_minimum_has_no_interval(logits, labels, temperature):
    ds = measure(logits, labels)
    assert number(ds, "temperature") == pytest.approx(temperature)
    assert np.isnan([number(ds, "temperature_low"), number(ds, "temperature_high")]).all()
    at_it = float(F.cross_entropy(logits.double() / temperature, labels))
    assert number(ds, "nll_scaled") == pytest.approx(at_it, abs=1e-6)


def test_the_least_smooth_logits_are_interpolated_to_a_ten_thousandth():
    logits = torch.zeros(60, 1000, dtype=torch.float64)
    logits[:, 0] = 8.0
    labels = (torch.arange(60) % 12 == 0).long()
    ds = measure(logits, labels)
    best = by_search(logits, labels)
    assert number(ds, "temperature") == pytest.approx(best, rel=1e-3)
    assert number(ds, "nll_scaled") == pytest.approx(float(F.cross_entropy(logits / best, labels)), abs=1e-4)


# --- intervals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_interval_of_the_ece_covers_that_of_many_more_images(temperature):
    """Of a calibrated model too, of which a percentile interval covers it never."""
    logits, labels = drawn(200_000, 5, temperature=temperature, seed=1)
    confidence, right = logits.softmax(1).max(1).values.numpy(), (logits.argmax(1) == labels).numpy()
    gaps = np.bincount(np.ceil(10 * confidence).astype(int) - 1, confidence - right, 10) / len(labels)
    found = [measure(logits[i : i + 300], labels[i : i + 300], resamples=60) for i in range(0, 6000, 300)]
    covered = [number(ds, "ece_low") <= np.abs(gaps).sum() <= number(ds, "ece_high") for ds in found]
    assert sum(covered) >= 9  # of 20
    signed = [number(ds, "ecse_low") <= gaps.sum() <= number(ds, "ecse_high") for ds in found]
    assert sum(signed) >= 16


def test_interval_of_the_ecse_is_that_of_a_mean():
    logits, labels = drawn(400, 10, temperature=2.0)
    ds = measure(logits, labels, resamples=2000)
    each = logits.softmax(1).max(1).values - (logits.argmax(1) == labels).double()
    half_width = 1.96 * float(each.std()) / 20
    assert number(ds, "ecse") == pytest.approx(float(each.mean()))
    assert number(ds, "ecse_high") - number(ds, "ecse") == pytest.approx(half_width, rel=0.1)
    assert number(ds, "ecse") - number(ds, "ecse_low") == pytest.approx(half_width, rel=0.1)


@settings(max_examples=12)
@given(
    count=st.integers(2, 30),
    classes=st.integers(2, 8),
    scale=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
    split=st.integers(1, 30),
    definition=st.sampled_from(["corrected", "paper"]),
    seed=st.integers(0, 999),
)
def test_bounds_hold_and_the_split_into_batches_does_not_matter(count, classes, scale, split, definition, seed):
    logits, labels = drawn(count, classes, scale=scale, seed=seed)
    options = {"definition": definition, "resamples": 20}
    ds, parts = measure(logits, labels, **options), measure(logits, labels, split=split, **options)
    for name, variable in ds.data_vars.items():
        np.testing.assert_allclose(parts[name], variable, rtol=1e-6, atol=1e-9, err_msg=name)
    for ending in ("", "_scaled"):
        ece, ecse = number(ds, f"ece{ending}"), number(ds, f"ecse{ending}")
        assert 0 <= number(ds, f"ece{ending}_low") <= number(ds, f"ece{ending}_high") <= 1
        assert abs(ecse) <= ece + 1e-12 <= 1 + 2e-12
    assert float(ds.share.sum()) == pytest.approx(1)
    np.testing.assert_allclose(ds.share_correct + ds.share_wrong, ds.share, atol=1e-12)
    # The interpolation of a thousandth of a nat at most is what the best temperature may lose to the model's own.
    assert number(ds, "nll_scaled") <= number(ds, "nll") + 1e-3
    assert float((ds.bin_accuracy * ds.share).sum()) == pytest.approx(number(ds, "top1"))


def test_one_image_has_no_uncertainty():
    ds = measure(*two_classes([0.8], [1]))
    for name in ds.data_vars:
        if name.endswith(("_se", "_low", "_high")) and not name.startswith("bin_accuracy_"):
            assert np.isnan(ds[name]).all(), name
    assert number(ds, "ece") == pytest.approx(0.2)


# --- targets and logits of other kinds --------------------------------------------------------------


def test_soft_targets_count_as_they_are_in_nll_and_brier_and_as_their_largest_class_elsewhere():
    logits, labels = drawn(50, 6)
    rng = torch.Generator().manual_seed(1)
    soft = 0.8 * F.one_hot(labels, 6) + 0.2 * torch.rand(50, 6, generator=rng, dtype=torch.float64).softmax(1)
    ds, hard = measure(logits, soft, split=20), measure(logits, labels)
    assert number(ds, "nll") == pytest.approx(float(F.cross_entropy(logits, soft)))
    assert number(ds, "brier") == pytest.approx(float((logits.softmax(1) - soft).square().sum(1).mean()))
    for name in ("top1", "top5", "bin_accuracy", "bin_confidence", "entropy", "unc_90", *ERRORS):
        np.testing.assert_allclose(ds[name], hard[name], rtol=1e-14)
    best = number(ds, "temperature")
    factors = (0.999, 1.0, 1.001)
    left, middle, right = (float(F.cross_entropy(logits / (best * factor), soft)) for factor in factors)
    assert middle < left
    assert middle < right
    assert number(ds, "nll_scaled") == pytest.approx(middle)
    assert (ds.attrs["targets"], hard.attrs["targets"]) == ("soft", "class numbers")
    one_hot = measure(logits, F.one_hot(labels, 6).float())
    for name in hard.data_vars:
        np.testing.assert_array_equal(one_hot[name], hard[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_less_precision_are_scored_in_double(dtype):
    logits, labels = drawn(60, 6, temperature=4.0)
    logits = logits.to(dtype)
    low, double = measure(logits, labels), measure(logits.double(), labels)
    for name in double.data_vars:
        np.testing.assert_array_equal(low[name], double[name], err_msg=name)


def test_a_model_in_half_precision_takes_soft_targets():
    model = create_model("vit_nano", image_size=8, num_classes=3, seed=0).to(torch.bfloat16)
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    soft = torch.rand(8, 3, generator=torch.Generator().manual_seed(1)).softmax(1)
    ds = calibration(model, (images, soft), resamples=2, progress=False)
    with torch.no_grad():
        logits = model.eval()(images.to(torch.bfloat16)).double()
    assert number(ds, "nll") == pytest.approx(float(F.cross_entropy(logits, soft.double())), abs=0.01)


# --- the pass, the dataset, the errors --------------------------------------------------------------


def test_one_pass_measures_it_beside_others():
    model = create_model("vit_nano", image_size=8, num_classes=4, seed=0)
    images, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    batches = [(images[:4], labels[:4]), {"x": images[4:], "labels": labels[4:]}]
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    tree = probe(model, batches, [Fourier(), Calibration(resamples=20)], progress=False)
    assert len(calls) == 4  # two batches, and two images twice to see how the model is made
    alone = calibration(model, batches, resamples=20, progress=False)
    assert alone.identical(tree["calibration"].to_dataset().assign_attrs(history=alone.attrs["history"]))
    spectra = fourier(model, batches, progress=False)
    np.testing.assert_array_equal(tree["fourier"].log_amplitude, spectra.log_amplitude)
    with torch.no_grad():
        logits = model.eval()(images).double()
    assert number(alone, "nll") == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_nothing_is_remembered_and_the_same_seed_gives_the_same_intervals():
    one = Calibration(resamples=20)
    first = one.run(Shown(), (as_images(drawn(30, 4, seed=1)[0]), drawn(30, 4, seed=1)[1]), progress=False)
    logits, labels = drawn(30, 6, seed=2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = one.run(Shown(), (as_images(logits), labels), progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    fresh = measure(logits, labels, resamples=20)
    assert again.drop_attrs(deep=False).identical(fresh.drop_attrs(deep=False))
    assert "top5" not in first
    other = measure(logits, labels, resamples=20, seed=1)
    assert number(other, "ecse_low") != number(fresh, "ecse_low")
    assert number(other, "ece") == number(fresh, "ece")


def test_dataset_keeps_the_schema_and_runs_stack(tmp_path):
    runs = [measure(*drawn(40, 6, seed=seed), definition="paper", bins=4) for seed in (0, 1)]
    for seed, run in enumerate(runs):
        run.attrs |= {"model": "vit_micro", "seed": seed, "accuracy": 50.0 + seed}  # as a study says them
        check(run)
    assert runs[0].attrs["definition"] == "paper"
    assert runs[0].sizes == {"bin": 4}
    np.testing.assert_allclose(runs[0].bin_high - runs[0].bin_low, 0.25)
    stacked = stack_runs(runs)
    save(stacked, tmp_path / "a.nc")
    np.testing.assert_array_equal(load(tmp_path / "a.nc").ece, [number(run, "ece") for run in runs])


LOGITS, LABELS = drawn(6, 4)


def spoiled(value):
    logits = LOGITS.clone()
    logits[4, 1] = value
    return logits


@pytest.mark.parametrize(
    ("logits", "targets", "words"),
    [
        (spoiled(math.nan), LABELS, "batch 1 has logits that are not finite, in 1 of 3 images"),
        (spoiled(math.inf), LABELS, "batch 1 has logits that are not finite, in 1 of 3 images"),
        (LOGITS, LABELS * 0 + 4, r"batch 0 has class numbers from 4 to 4, the model's 4 classes are 0 to 3"),
        (LOGITS, LABELS * 0 - 9, "batch 0 has class numbers from -9 to -9"),
        (LOGITS, LABELS.double(), r"targets of torch.float64 of \(3,\): give class numbers \(3,\), or soft"),
        (LOGITS, LABELS[:, None], r"targets of torch.int64 of \(3, 1\)"),
        (LOGITS, F.one_hot(LABELS, 4), r"targets of torch.int64 of \(3, 4\): .* of floating point"),
        (LOGITS, LOGITS.softmax(1) / 2, "soft targets that are no distributions"),
        (LOGITS, F.one_hot(LABELS, 4) * 3.0 - 0.5, "soft targets that are no distributions"),
        (LOGITS[:, :1], LABELS, r"output of \(3, 1\), not \(image, class\) with two classes or more"),
    ],
)
def test_what_cannot_be_scored_is_answered_in_words(logits, targets, words):
    with pytest.raises(ValueError, match=words):
        measure(logits, targets, split=3)


def test_batches_without_targets_or_of_other_classes_are_answered_in_words():
    with pytest.raises(ValueError, match=r"calibration: the batch has no targets: give batches of \(images, labels\)"):
        calibration(Shown(), as_images(LOGITS), progress=False)
    with pytest.raises(ValueError, match=r"targets of list: give class numbers \(6,\).* as a tensor"):
        calibration(Shown(), {"x": as_images(LOGITS), "labels": LABELS.tolist()}, progress=False)
    one = Calibration()
    one.start()
    one.update(LABELS, LOGITS)
    with pytest.raises(ValueError, match="batch 1 has logits of 3 classes, those before had 4"):
        one.update(torch.zeros(6, dtype=torch.long), LOGITS[:, :3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bins": 0}, "bins=0 is not a whole number from 1 on"),
        ({"bins": 2.5}, "bins=2.5 is not"),
        ({"bins": True}, "bins=True is not"),
        ({"resamples": 1}, "resamples=1 is not a whole number from 2 on"),
        ({"definition": "papr"}, "unknown definition 'papr'. Did you mean 'paper'"),
    ],
)
def test_options_that_are_none(options, words):
    with pytest.raises(ValueError, match=words):
        Calibration(**options)


def test_intervals_hold_their_estimate():
    """Of few images of a calibrated model, more is taken off than the interval is wide."""
    for seed in range(40):
        ds = measure(*drawn(50, 5, seed=seed), resamples=60)
        for name in ("ece", "ecse", "ece_scaled", "ecse_scaled"):
            assert number(ds, f"{name}_low") <= number(ds, name) <= number(ds, f"{name}_high"), (seed, name)
