"""Runs: cached by everything the weights depend on, and by nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vitprobe import runs
from vitprobe.models import create_model
from vitprobe.runs import DataSpec, Run, cache_folder, list_runs, load_run, trained
from vitprobe.training import Recipe, fit
from vitprobe.training.folder import only_one

SMALL = DataSpec(spec="digits", train_size=60, test_size=40)
RUN = Run(model="convmixer_nano", data=SMALL, recipe=Recipe(epochs=2, batch_size=20, seed=3))


def test_trained_once(tmp_path):
    first = trained(RUN, cache=tmp_path)
    assert RUN.fraction(tmp_path) == 1.0
    torch.rand(5)
    again = trained(RUN, cache=tmp_path)
    # The seconds are those of the first training: nothing was trained again.
    np.testing.assert_array_equal(first.history.seconds, again.history.seconds)
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not again.model.training


def test_a_fresh_cache_gives_the_same_weights(tmp_path):
    first = trained(RUN, cache=tmp_path / "a")
    torch.rand(7)
    second = trained(RUN, cache=tmp_path / "b")
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_key_depends_on_all_that_matters():
    others = [
        Run(model="resnet_nano", data=SMALL, recipe=RUN.recipe),
        Run(model=RUN.model, options={"depth": 2}, data=SMALL, recipe=RUN.recipe),
        Run(model=RUN.model, data=DataSpec(spec="digits", train_size=70, test_size=40), recipe=RUN.recipe),
        Run(model=RUN.model, data=SMALL, recipe=Recipe(epochs=2, batch_size=20, seed=4)),
    ]
    assert len({run.key() for run in [RUN, *others]}) == 5


def test_initialisers_write_before_training_and_count_in_the_key(tmp_path):
    plain = Run(model="simple_vit_nano", options={"depth": 1}, data=SMALL, recipe=RUN.recipe)
    assert "initialisers" not in plain.config()  # runs from before there were any keep their keys
    both = {"impulse_": {"kernel_size": 3}, "mimetic_": {"query_key": None}}
    run = replace(plain, initialisers=both)
    swapped = replace(plain, initialisers=dict(reversed(both.items())))
    assert len({plain.key(), run.key(), swapped.key()}) == 3
    model = trained(run, cache=tmp_path).model
    assert [one["initializer"] for one in json.loads(model.initialisation)] == ["impulse", "mimetic"]
    with pytest.raises(ValueError, match="Did you mean 'impulse_'"):
        trained(replace(plain, initialisers={"impuls_": {}}), cache=tmp_path)


def test_names_of_other_libraries_are_file_names(tmp_path):
    folder = Run(model="timm:vit_tiny_patch16_224", data=SMALL).folder(tmp_path)
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("timm-vit_tiny_patch16_224-")


def test_key_does_not_depend_on_where_the_data_lie(tmp_path):
    from vitprobe.data import load_data

    digits = load_data("digits", train_size=60, test_size=40)
    files = [tmp_path / "train.npz", tmp_path / "test.npz"]
    for file, split in zip(files, (digits.train, digits.test), strict=True):
        images = split.images[:, 0].numpy()
        np.savez(file, images=images, labels=split.labels.numpy(), label_names=np.array(digits.class_names))
    moved = Run(model=RUN.model, data=DataSpec(spec=f"npz:{files[0]},{files[1]}"), recipe=RUN.recipe)
    assert moved.key() == RUN.key()


def test_fraction_before_anything(tmp_path):
    assert RUN.fraction(tmp_path) == 0.0


def test_cache_folder_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VITPROBE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_run_that_starts_from_another_and_is_taught_by_a_third(tmp_path):
    """A relative_vit goes on as the function that its convolutional_vit is, then learns from a teacher too."""
    recipe = Recipe(epochs=1, batch_size=20, seed=3)
    first = Run(model="convolutional_vit_nano", data=SMALL, recipe=recipe)
    run = Run(model="relative_vit_nano", start=first, teacher=RUN, data=SMALL, recipe=replace(recipe, distillation=0.5))
    assert len({run.key(), replace(run, start=None).key(), replace(run, teacher=None).key()}) == 3
    assert "start" not in first.config() and "teacher" not in first.config()
    result = trained(run, cache=tmp_path)
    told = json.loads(result.history.attrs["hand_over"])
    assert told["relative_gap"] < 0.1 and told["images"] == 40
    assert told["accuracy_before"] == float(trained(first, cache=tmp_path).history.test_accuracy[-1])
    assert {path.name.split("-")[0] for path in (tmp_path / "runs").iterdir()} == {
        "convolutional_vit_nano",
        "relative_vit_nano",
        "convmixer_nano",
    }
    # Of the same architecture: the very weights.
    same = replace(run, model="convolutional_vit_nano", teacher=None, recipe=replace(recipe, lr=1e-30, weight_decay=0))
    source, found = trained(first, cache=tmp_path).model, trained(same, cache=tmp_path).model
    assert torch.equal(source.head.weight, found.head.weight)
    with pytest.raises(ValueError, match="weights go from a convolutional_vit to a relative_vit"):
        trained(replace(same, model="vit_nano"), cache=tmp_path)


def test_the_network_of_an_earlier_epoch(tmp_path):
    run = replace(RUN, recipe=replace(RUN.recipe, snapshots=(0, 1)))
    result = trained(run, cache=tmp_path)
    fresh = create_model(run.model, image_size=8, channels=1, num_classes=10, seed=3)
    for model in (result.at(0), load_run(result.folder, 0)):
        assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert not torch.equal(next(result.at(1).parameters()), next(result.model.parameters()))
    with pytest.raises(FileNotFoundError, match=r"no snapshot of epoch 2, but of \[0, 1\]"):
        result.at(2)


def test_a_run_trained_to_an_epoch_is_the_beginning_of_the_whole(tmp_path):
    run = replace(RUN, recipe=replace(RUN.recipe, snapshots=(1,)))
    begun = trained(run, cache=tmp_path, until=1)
    early = begun.at(1).state_dict()
    assert len(begun.history.epoch) == 1 and run.fraction(tmp_path) == 0.5
    assert len(trained(run, cache=tmp_path).history.epoch) == 2
    later = trained(run, cache=tmp_path, until=1).at(1).state_dict()
    assert all(torch.equal(early[name], later[name]) for name in early)


def test_a_folder_gives_its_network_back(tmp_path):
    options = {"depth": 2, "dim": 24}
    recipe = replace(RUN.recipe, epochs=1)
    run = Run(model="vit_nano", options=options, initialisers={"mimetic_": {}}, data=SMALL, recipe=recipe)
    result = trained(run, cache=tmp_path)
    model = load_run(result.folder)
    assert not model.training and model.initialisation == result.model.initialisation
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), result.model.parameters(), strict=True))
    with pytest.raises(FileNotFoundError, match="holds no trained network"):
        load_run(tmp_path)
    fit(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), result.data, run.recipe, folder=tmp_path)
    with pytest.raises(ValueError, match=r"Sequential in .* cannot be made by create_model.*load_weights"):
        load_run(tmp_path)


def test_keys_are_those_of_before_a_setting_came():
    """Networks that are trained already stay what they are: a new setting at its default is not part of the key."""
    old = {
        "batch_size", "betas", "augment", "channels_last", "clip", "cutmix", "decay", "deterministic", "epochs",
        "label_smoothing", "lr", "min_lr", "mix_probability", "mix_switch", "mixup", "momentum", "optimizer",
        "precision", "schedule", "seed", "stochastic_depth", "warmup_epochs", "weight_decay",
    }  # fmt: skip
    assert set(RUN.config()["recipe"]) == old
    assert set(replace(RUN, recipe=replace(RUN.recipe, accumulate=2)).config()["recipe"]) == old | {"accumulate"}


def test_a_network_that_a_name_does_not_make_is_said(tmp_path):
    result = trained(replace(RUN, recipe=replace(RUN.recipe, epochs=1)), cache=tmp_path)
    file = result.folder / "run.json"
    said = json.loads(file.read_text())
    for created in (None, {"name": "gone"}, said["created"] | {"norm": "torch.nn.LayerNorm"}):
        file.write_text(json.dumps(said | {"created": created}))
        with pytest.raises(ValueError, match=r"ConvMixer in .* cannot be made by create_model.*load_weights"):
            load_run(result.folder)


def test_what_is_trained_is_listed(tmp_path):
    assert list_runs(tmp_path).empty
    trained(RUN, cache=tmp_path)

    def stop(model, row):
        raise KeyboardInterrupt

    other = replace(RUN, model="vit_nano", recipe=replace(RUN.recipe, epochs=3))
    with pytest.raises(KeyboardInterrupt):
        trained(other, cache=tmp_path, on_epoch=stop)
    with only_one(other.folder(tmp_path)):
        assert set(list_runs(tmp_path).state) == {"finished", "running"}
    table = list_runs(tmp_path).set_index("model")
    assert table.loc["convmixer_nano", ["data", "seed", "epoch", "epochs", "state"]].tolist() == [
        "digits",
        3,
        2,
        2,
        "finished",
    ]
    assert table.loc["vit_nano", ["epoch", "epochs", "state"]].tolist() == [0, 3, "stopped"]
    accuracy = trained(RUN, cache=tmp_path).history.test_accuracy.values[-1]
    assert table.loc["convmixer_nano", "test_accuracy"] == accuracy
    assert table.loc["convmixer_nano", "folder"] == str(RUN.folder(tmp_path).relative_to(tmp_path))


def test_damaged_weights_are_not_given_out(tmp_path):
    """The file can still be read: only its checksum tells."""
    folder = trained(RUN, cache=tmp_path).folder
    file = folder / "checkpoint.pt"
    weights = next(iter(torch.load(file, weights_only=True)["model"].values()))
    raw = bytearray(file.read_bytes())
    raw[raw.find(weights.numpy().tobytes()[:64]) + 10] ^= 1
    file.write_bytes(raw)
    torch.load(file, weights_only=True)
    with pytest.raises(ValueError, match=r"checkpoint.pt is damaged.*goes on from checkpoint.previous.pt"):
        load_run(folder)


def test_a_run_goes_on_although_its_initial_weights_come_out_otherwise(tmp_path, monkeypatch):
    """On another machine the last digits of what an initialiser computes may differ; the configuration does not."""
    before = trained(RUN, cache=tmp_path, until=1)
    monkeypatch.setattr(runs, "create_model", lambda name, **named: create_model(name, **named | {"seed": 8}))
    assert len(trained(RUN, cache=tmp_path).history.epoch) == 2
    assert before.history.train_loss.values[0] == trained(RUN, cache=tmp_path).history.train_loss.values[0]


def test_no_folder_has_no_list(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        list_runs(tmp_path / "gone")
