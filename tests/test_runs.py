"""Runs: cached by everything the weights depend on, and by nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vitprobe.runs import DataSpec, Run, cache_folder, trained
from vitprobe.training import Recipe

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
