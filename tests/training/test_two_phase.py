"""Two phases: the function gap in closed form, the hand-over of the paper's networks, and its folder."""

import pytest
import torch
from torch import nn

from vitprobe import results
from vitprobe.data import load_data
from vitprobe.models import create_model
from vitprobe.models.convolutional_vit import transfer_
from vitprobe.probes import feature_variance
from vitprobe.training import Measurements, Recipe, fit, fit_two_phases, function_gap, split_recipe

RECIPE = Recipe(epochs=5, batch_size=50, lr=2e-3, warmup_epochs=1.0, snapshots=(0, 2, 5))


class Constant(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def batches(count=7):
    return [(torch.zeros(count, 1, 2, 2), torch.tensor([0] * 3 + [1] * (count - 3)))]


def test_the_gap_between_two_constants():
    """(3, 4) and (3, 1) are 3 apart, the first is 5 long; they decide for classes 1 and 0."""
    gap = function_gap(Constant([3.0, 4.0]), Constant([3.0, 1.0]), batches())
    assert gap.gap == 3.0 and gap.gap_se == 0.0 and gap.largest_gap == 3.0
    assert gap.relative_gap == pytest.approx(0.6)
    assert gap.agreement == 0.0 and gap.images == 7
    assert gap.accuracy_before == pytest.approx(4 / 7) and gap.accuracy_after == pytest.approx(3 / 7)


def test_the_gap_to_oneself_is_nothing_and_modes_stay():
    model = create_model("vit_nano", image_size=8, channels=1, num_classes=10, seed=0).train()
    gap = function_gap(model, model, load_data("digits", test_size=40).loader("test"))
    assert gap.gap == gap.largest_gap == 0.0 and gap.agreement == 1.0
    assert model.training


@pytest.mark.parametrize(("share", "epochs", "kept"), [(0.5, (2, 3), ((0, 2), (3,))), (0.8, (4, 1), ((0, 2), (1,)))])
def test_epochs_and_snapshots_are_shared_out(share, epochs, kept):
    phases = split_recipe(RECIPE, share)
    assert tuple(one.epochs for one in phases) == epochs
    assert tuple(one.snapshots for one in phases) == kept
    assert all(one.lr == RECIPE.lr and one.warmup_epochs == 1.0 for one in phases)


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_a_phase_without_an_epoch_is_refused(share):
    with pytest.raises(ValueError, match="each phase needs at least one"):
        split_recipe(RECIPE, share)


def pair():
    data = load_data("digits", train_size=200, test_size=100)
    shape = {"image_size": data.image_size, "channels": data.channels, "num_classes": data.num_classes}
    return data, *(create_model(f"{name}_vit_nano", seed=0, **shape) for name in ("convolutional", "relative"))


@pytest.mark.parametrize("strength", [8.0, 20.0])
def test_hand_over_of_the_papers_networks(tmp_path, strength):
    """The sharper the heads, the smaller the gap: about e^-strength times the tokens; then attention trains on."""
    data, first, second = pair()
    history = fit_two_phases(
        first,
        second,
        data,
        RECIPE,
        transfer=lambda target, source: transfer_(target, source, strength=strength),
        folder=tmp_path,
        progress=False,
    )
    assert history.epoch.values.tolist() == [1, 2, 3, 4, 5]
    assert history.phase.values.tolist() == ["convolution"] * 2 + ["attention"] * 3
    assert float(history.hand_over_relative_gap) < (0.05 if strength == 8.0 else 1e-5)
    assert float(history.hand_over_accuracy_before) == history.test_accuracy.values[1]
    assert abs(float(history.hand_over_accuracy_after - history.hand_over_accuracy_before)) <= 0.02
    results.save(history, tmp_path / "history.nc")
    again = fit_two_phases(*pair()[1:], data, RECIPE, transfer=transfer_, folder=tmp_path, progress=False)
    assert again.test_accuracy.equals(history.test_accuracy)


def test_the_second_phase_is_a_training_from_the_handed_over_weights():
    data, first, second = pair()
    recipes = split_recipe(Recipe(epochs=3, batch_size=50), 0.34)
    fit(first, data, recipes[0], progress=False)
    transfer_(second, first)
    expected = fit(second, data, recipes[1], epochs_before=1, progress=False)
    data, first, second = pair()
    history = fit_two_phases(
        first, second, data, Recipe(epochs=3, batch_size=50), transfer=transfer_, share=0.34, progress=False
    )
    assert history.train_loss.values[1:].tolist() == expected.train_loss.values.tolist()
    with pytest.raises(TypeError, match="until= stops one training"):
        fit_two_phases(first, second, data, RECIPE, transfer=transfer_, until=1)


def test_the_second_phase_goes_on_with_the_images_of_the_next_epochs():
    """Order and augmentation of two phases are those of one training, and no epoch is seen twice."""

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)
            self.seen = []

        def forward(self, x):
            if self.training:
                self.seen.append(x.double().sum((1, 2, 3)).tolist())
            return self.head(x.flatten(1))

    data = load_data("digits", train_size=40, test_size=20)
    whole, first, second = Recording(), Recording(), Recording()
    recipe = Recipe(epochs=4, batch_size=20, augment="crop", mixup=0.8)
    fit(whole, data, recipe, progress=False)
    fit_two_phases(first, second, data, recipe, transfer=lambda to, source: None, progress=False)
    assert first.seen + second.seen == whole.seen
    assert len({str(batch) for batch in whole.seen}) == 8


def test_epochs_of_both_phases_count_on(tmp_path):
    """So that measurements of both are kept apart."""
    seen = []
    data, first, second = pair()
    watch = Measurements({"size": lambda model: size(model)}, tmp_path)

    def size(model):
        seen.append(type(model.get_submodule("blocks.0.attention")).__name__)
        return feature_variance(model, data.loader("test", batch_size=50), progress=False)

    fit_two_phases(first, second, data, RECIPE, transfer=transfer_, folder=tmp_path, on_epoch=watch, progress=False)
    assert seen == ["ShiftAttention"] * 2 + ["Attention"] * 3
    assert watch.dataset("size").epoch.values.tolist() == [1, 2, 3, 4, 5]
