import json
import math
import random

import numpy as np
import pytest
import torch
from tiny import StopError, Tiny, make_data, numbers, same_weights, stop_after, tiny
from torch import nn

from vitprobe import results
from vitprobe.data import ImageData, Split
from vitprobe.training import Recipe, evaluate, fit, load_snapshot

RECIPE = Recipe(epochs=3, batch_size=16, lr=0.01, mixup=1.0, cutmix=1.0, label_smoothing=0.1, augment="flip")


def test_history_keeps_the_schema(tmp_path):
    history = fit(tiny(), make_data(), RECIPE)
    results.save(history, tmp_path / "history.nc")
    assert history.epoch.values.tolist() == [1, 2, 3]
    assert set(history.data_vars) == {
        "train_loss",
        "train_accuracy",
        "train_entropy_floor",
        "test_loss",
        "test_loss_se",
        "test_accuracy",
        "test_accuracy_se",
        "lr",
        "seconds",
    }
    assert json.loads(history.attrs["config"])["recipe"] == RECIPE.config()
    assert (history.train_loss > history.train_entropy_floor).all()


def test_it_learns():
    recipe = Recipe(epochs=12, batch_size=16, lr=0.01, weight_decay=0.0)
    history = fit(tiny(), make_data(train=120, test=60), recipe)
    assert history.test_accuracy.values[-1] > 0.9
    assert history.train_loss.values[-1] < 0.3 * history.train_loss.values[0]


def test_same_seed_same_numbers_whatever_ran_before_and_the_callers_random_state_stays():
    recipe = Recipe(**{**RECIPE.config(), "stochastic_depth": 0.5})
    first = tiny()
    expected = fit(first, make_data(), recipe)
    torch.rand(13)
    np.random.rand(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    second = tiny()
    found = fit(second, make_data(), recipe)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]
    assert numbers(found).equals(numbers(expected))
    assert same_weights(first, second)
    other = fit(tiny(), make_data(), Recipe(**{**recipe.config(), "seed": 1}))
    assert not numbers(other).equals(numbers(expected))


def test_stopped_at_an_epoch_it_goes_on_as_if_it_had_not(tmp_path):
    recipe = Recipe(**{**RECIPE.config(), "snapshots": (1, 2, 3)})
    whole, part = tiny(), tiny()
    expected = fit(whole, make_data(), recipe, folder=tmp_path / "whole")
    begun = fit(part, make_data(), recipe, folder=tmp_path / "part", until=2)
    assert numbers(begun).equals(numbers(expected.isel(epoch=slice(2)))) and not part.training
    load_snapshot(whole_at_2 := tiny(), tmp_path / "whole", 2)
    assert same_weights(part, whole_at_2)
    again = tiny()
    assert len(fit(again, make_data(), recipe, folder=tmp_path / "part", until=1).epoch) == 2  # further already
    assert same_weights(again, part)
    assert numbers(fit(again, make_data(), recipe, folder=tmp_path / "part")).equals(numbers(expected))
    assert same_weights(again, whole)
    assert numbers(fit(tiny(), make_data(), RECIPE, until=1)).equals(numbers(expected.isel(epoch=slice(1))))
    for wrong in (0, 4, 1.5, True):
        with pytest.raises(ValueError, match=r"until=.*1 to 3"):
            fit(tiny(), make_data(), RECIPE, until=wrong)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, optimizer):
    recipe = Recipe(**{**RECIPE.config(), "stochastic_depth": 0.5, "optimizer": optimizer})
    whole = tiny()
    expected = fit(whole, make_data(), recipe)
    with pytest.raises(StopError):
        fit(tiny(), make_data(), recipe, folder=tmp_path, on_epoch=stop_after(1))
    torch.rand(7)
    resumed = tiny()  # its weights come from the folder
    seen = []
    found = fit(
        resumed,
        make_data(),
        recipe,
        folder=tmp_path,
        on_epoch=lambda model, row: seen.append(row["epoch"]),
    )
    # Once more for epoch 1, whose call failed.
    assert seen == [1, 2, 3]
    assert numbers(found).equals(numbers(expected))
    assert same_weights(whole, resumed)


def test_finished_folder_gives_weights_and_history_without_training(tmp_path):
    model, again = tiny(), tiny()
    expected = fit(model, make_data(), RECIPE, folder=tmp_path)
    stamp = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    found = fit(again, make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(1))
    assert found.to_dataframe().equals(expected.to_dataframe())
    assert same_weights(model, again) and not again.training
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "recipe.json").read_text()) == RECIPE.config()
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["epoch"] == progress["epochs"] == 3
    assert progress["test_accuracy"] == found.test_accuracy.values[-1]
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_checkpoint_falls_back_and_says_so(tmp_path):
    whole = tiny()
    expected = fit(whole, make_data(), RECIPE)
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2))
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:2000])
    resumed = tiny()
    with pytest.warns(UserWarning, match=r"checkpoint.pt .* is damaged.*checkpoint.previous.pt, epoch 1"):
        found = fit(resumed, make_data(), RECIPE, folder=tmp_path)
    assert numbers(found).equals(numbers(expected))
    assert same_weights(whole, resumed)


def test_no_readable_checkpoint_is_said_rather_than_trained_over(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    (tmp_path / "checkpoint.previous.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"no checkpoint can be read.*Delete"):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path)


def test_another_recipe_or_data_is_refused_with_both_values(tmp_path):
    recipe = Recipe(**{**RECIPE.config(), "epochs": 1})
    fit(tiny(), make_data(), recipe, folder=tmp_path)
    other = Recipe(**{**recipe.config(), "lr": 0.5, "seed": 3})
    with pytest.raises(ValueError) as error:
        fit(tiny(), make_data(), other, folder=tmp_path)
    assert "recipe.lr was 0.01 and is now 0.5" in str(error.value)
    assert "recipe.seed was 0 and is now 3" in str(error.value)
    assert "another folder=" in str(error.value)
    with pytest.raises(ValueError, match=r"data\.train_size was 41 and is now 44"):
        fit(tiny(), make_data(train=44), recipe, folder=tmp_path)
    assert json.loads((tmp_path / "recipe.json").read_text()) == recipe.config()


def test_interrupt_leaves_the_last_epoch_and_says_how_to_go_on(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2, KeyboardInterrupt))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 2
    message = capsys.readouterr().err
    assert "after 2 of 3 epochs" in message and f"folder={str(tmp_path)!r}" in message


def test_loss_that_is_not_finite_names_the_steps_and_keeps_the_last_good_checkpoint(tmp_path):
    def spoil(model, row):
        if row["epoch"] == 1:
            model.head[2].weight.data.fill_(math.inf)

    with pytest.raises(FloatingPointError, match=r"from step 1 of epoch 2 on \(step 4 of the run\)"):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=spoil)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["epoch"] == 1
    assert all(value.isfinite().all() for value in saved["model"].values())


class Logits(nn.Module):
    """Constant logits from its only parameter."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        return self.values.expand(len(x), -1)


def test_short_last_batch_is_not_over_counted():
    """41 images in batches of 16, 16 and 9: the mean over images is the mean over all, not over batches."""
    data = make_data()
    recipe = Recipe(epochs=1, batch_size=16, lr=1e-30, weight_decay=0, warmup_epochs=0)
    model = Logits([1.0, 0.0, -1.0])
    history = fit(model, data, recipe)
    losses = -torch.log_softmax(torch.tensor([1.0, 0.0, -1.0]).double(), 0)
    assert history.train_loss.values[0] == pytest.approx(losses[data.train.labels].mean().item(), rel=1e-6)
    assert history.train_accuracy.values[0] == pytest.approx(14 / 41)
    assert history.test_loss.values[0] == pytest.approx(losses[data.test.labels].mean().item(), rel=1e-6)


def test_clipping_bounds_the_step():
    """Plain gradient descent moves by lr times the gradient, whose norm is at most `clip`."""

    def moved(clip):
        model = tiny()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        recipe = Recipe(
            epochs=1,
            batch_size=64,
            optimizer="sgd",
            momentum=0.0,
            weight_decay=0.0,
            lr=0.5,
            warmup_epochs=0,
            clip=clip,
        )
        fit(model, make_data(), recipe)
        return (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()

    assert moved(None) > 0.01
    assert moved(0.001) == pytest.approx(0.5 * 0.001, rel=1e-3)


def test_wrong_number_of_classes_is_said():
    with pytest.raises(ValueError, match="of 3 classes: build it with num_classes=3"):
        fit(Tiny(classes=4), make_data(), RECIPE)
    with pytest.raises(ValueError, match="no trainable parameter"):
        fit(tiny().requires_grad_(False), make_data(), RECIPE)


@pytest.mark.parametrize("settings", [{"precision": "bfloat16"}, {"channels_last": True}, {"deterministic": True}])
def test_ways_to_compute_change_little_and_leave_no_switch(settings):
    recipe = Recipe(**{**RECIPE.config(), "epochs": 1, "lr": 0.001})
    expected = fit(tiny(), make_data(), recipe)
    found = fit(tiny(), make_data(), Recipe(**{**recipe.config(), **settings}))
    assert found.train_loss.values == pytest.approx(expected.train_loss.values, rel=0.02)
    assert not torch.are_deterministic_algorithms_enabled()


def test_frozen_weights_stay_and_no_gradient_is_left():
    model = tiny()
    model.stem.requires_grad_(False)
    before = model.stem[0].weight.clone()
    fit(model, make_data(), RECIPE)
    assert torch.equal(model.stem[0].weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_digits_in_a_few_epochs():
    from vitprobe.data import load_data

    data = load_data("digits")
    pixels = data.train.images[0].numel()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, data.num_classes))
    history = fit(model, data, Recipe(epochs=8, batch_size=64, lr=5e-3))
    assert history.test_accuracy.values[-1] > 0.9
    assert evaluate(model, data.loader("test")).accuracy == history.test_accuracy.values[-1]


class Watcher(nn.Module):
    """Keeps what it is shown, and what dropout makes of ones."""

    def __init__(self, classes=3):
        super().__init__()
        self.head = nn.Linear(36, classes)
        self.shown, self.dropped = [], []

    def forward(self, x):
        if self.training:
            self.shown.append(x.clone())
            self.dropped.append(nn.functional.dropout(torch.ones(64), 0.5, self.training))
        return self.head(x.flatten(1))


def test_every_epoch_draws_anew():
    """Order and dropout of an epoch are not those of the epoch before; and training is in training mode."""
    model = Watcher().eval()
    fit(model, make_data(train=16), Recipe(epochs=2, batch_size=16))
    first, second = model.shown
    assert not torch.equal(first, second)
    assert not torch.equal(*model.dropped)


def test_mixing_of_every_epoch_draws_anew():
    """Two images mixed with each other by λ: their distance shrinks by |2λ - 1|, whatever their order."""
    images = torch.stack([torch.zeros(1, 6, 6), torch.full((1, 6, 6), 255)]).byte()
    pair = Split(images, torch.tensor([0, 1]))
    data = ImageData(spec="pair", name="pair", train=pair, test=pair, class_names=("a", "b"), mean=(0.0,), std=(1.0,))
    model = Watcher(classes=2)
    fit(model, data, Recipe(epochs=6, batch_size=2, mixup=1.0))
    distances = {round((batch[0] - batch[1]).abs().mean().item(), 4) for batch in model.shown}
    assert len(distances) == 6


def test_fallback_keeps_a_good_checkpoint_at_every_moment(tmp_path):
    """The next save must not put the damaged file in the place of the good one."""
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2))
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2))
    for name, epoch in (("checkpoint.pt", 2), ("checkpoint.previous.pt", 1)):
        assert torch.load(tmp_path / name, weights_only=True)["epoch"] == epoch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_trains_resumes_and_leaves_the_random_state(tmp_path):
    recipe = Recipe(**{**RECIPE.config(), "augment": "none", "deterministic": True})
    expected = fit(tiny(), make_data(), recipe, device="cpu")
    before = torch.cuda.get_rng_state()
    with pytest.raises(StopError):
        fit(tiny(), make_data(), recipe, folder=tmp_path, on_epoch=stop_after(1))
    model = tiny()
    found = fit(model, make_data(), recipe, folder=tmp_path)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert next(model.parameters()).is_cuda
    # Dropout draws other masks there; targets and rates are the same.
    assert found.train_entropy_floor.values == pytest.approx(expected.train_entropy_floor.values, rel=1e-5)
    assert found.lr.values.tolist() == expected.lr.values.tolist()


def test_a_compiled_training_is_the_same(tmp_path, monkeypatch):
    """Through the compiler's front end, without the minute of its C++; names in checkpoints stay plain."""
    calls = []

    def compile_(module, original=torch.compile):
        calls.append(module)
        return original(module, backend="eager")

    expected = tiny()
    histories = [fit(expected, make_data(), RECIPE)]
    monkeypatch.setattr(torch, "compile", compile_)
    model = tiny()
    histories.append(fit(model, make_data(), Recipe(**{**RECIPE.config(), "compile": True}), folder=tmp_path))
    assert calls == [model]
    assert numbers(histories[1]).equals(numbers(histories[0])) and same_weights(expected, model)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert list(saved) == list(model.state_dict())


def test_repeated_augmentation_sees_each_image_several_times():
    model = Watcher()
    fit(model, make_data(train=12), Recipe(epochs=1, batch_size=12, repeats=3))
    assert len(model.shown[0].unique(dim=0)) == 4
