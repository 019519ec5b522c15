"""A training in two processes, against one process with the same batches; gradients in parts, against whole ones."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import results, run

from vitprobe.cli import main
from vitprobe.data import load_data
from vitprobe.models import create_model
from vitprobe.ranks import Ranks
from vitprobe.results import load
from vitprobe.training import Recipe, evaluate, fit
from vitprobe.training.parallel import same_statistics

ROOT = Path(__file__).parents[2]
# Batches of 24, 24 and 12; in the last, three pairs for each process.
BASE = Recipe(
    epochs=2,
    batch_size=24,
    optimizer="sgd",
    lr=0.02,
    warmup_epochs=0.5,
    augment="crop",
    label_smoothing=0.1,
    mixup=1.0,
    cutmix=1.0,
    clip=1.0,
)
CASES = {
    "vit": ("vit_nano", BASE),
    "batch normalisation": ("convmixer_nano", BASE),
    # With seed 0 a ReLU's input lies so near zero that rounding decides, and weights move by 1e-3.
    "batch normalisation by steps": ("resnet_nano", replace(BASE, mixup=0.0, cutmix=0.0, batch_size=20, seed=2)),
    "parts": ("vit_nano", replace(BASE, accumulate=3)),
    "adamw": ("alternet_nano", replace(BASE, optimizer="adamw", lr=1e-3)),
    "random augmentation": ("convit_nano", replace(BASE, augment="crop+trivialaugment+erase-0.5")),
}


def data():
    return load_data("digits", train_size=60, test_size=33)


def network(name):
    return create_model(name, image_size=8, channels=1, num_classes=10, seed=0)


def trained(name, recipe, **options):
    model = network(name)
    history = fit(model, data(), recipe, progress=False, **options)
    return model.state_dict(), history.drop_vars("seconds").load()


def in_two(name, recipe):
    return lambda rank: trained(name, recipe, group=dist.group.WORLD)


def interrupted(rank):
    """Trained to the end, and taken up again by fresh networks."""
    folder = Path(sys.argv[2]) / "interrupted"
    recipe = CASES["batch normalisation"][1]

    first = network("convmixer_nano")
    fit(first, data(), recipe, folder=folder, group=dist.group.WORLD, progress=False)
    again = network("convmixer_nano")
    fit(again, data(), recipe, folder=folder, group=dist.group.WORLD, progress=False)
    return first.state_dict(), again.state_dict(), [type(one).__name__ for one in again.modules()]


def uneven(rank):
    """Batches of 20 in 7 parts and batch normalisation: parts are other images than in one process, and as many."""
    return trained("convmixer_nano", replace(BASE, accumulate=7, batch_size=20, epochs=1), group=dist.group.WORLD)


def refused(rank):
    """A mistake that only the first process can see is said by both."""
    folder = Path(sys.argv[2]) / "interrupted"
    other = replace(CASES["batch normalisation"][1], lr=0.5)
    fit(network("convmixer_nano"), data(), other, folder=folder, group=dist.group.WORLD, progress=False)


def spoiled(rank):
    """Weights that are no numbers in one process only: both stop, and neither waits for the other."""
    model = network("vit_nano")

    def spoil(module, given):
        if rank == 1 and module.training:
            return (given[0] * float("nan"),)

    model.register_forward_pre_hook(spoil)
    fit(model, data(), BASE, group=dist.group.WORLD, progress=False)


def copied(rank):
    """A callback that copies the network, as averages over epochs do, and calls it, on one process only."""
    outputs = []

    def copy_and_call(model, row):
        outputs.append(copy.deepcopy(model)(torch.zeros(2, 1, 8, 8)).shape)

    recipe = replace(BASE, epochs=1)
    fit(network("convmixer_nano"), data(), recipe, group=dist.group.WORLD, on_epoch=copy_and_call, progress=False)
    return outputs


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x):
        return self.used(x.flatten(1))


def unused(rank):
    fit(Unused(), data(), BASE, group=dist.group.WORLD, progress=False)


def again_failing(rank):
    """The callback of a finished epoch fails when the training is taken up again."""

    def fail(model, row):
        raise LookupError("still no such thing")

    folder = Path(sys.argv[2]) / "failing"
    for _ in range(2):
        try:
            fit(
                network("vit_nano"),
                data(),
                replace(BASE, epochs=1),
                folder=folder,
                group=dist.group.WORLD,
                on_epoch=fail,
                progress=False,
            )
        except Exception as error:
            found = error
    raise found


def failing_callback(rank):
    def fail(model, row):
        raise LookupError("no such thing")

    fit(network("vit_nano"), data(), BASE, group=dist.group.WORLD, on_epoch=fail, progress=False)


def too_small(rank):
    fit(network("vit_nano"), data(), replace(BASE, batch_size=59), group=dist.group.WORLD, progress=False)


def evaluated(rank):
    batches = list(data().loader("test", batch_size=10))
    return evaluate(network("vit_nano"), batches[rank::2], group=dist.group.WORLD)


NORMS = {
    "plain": lambda: nn.BatchNorm2d(3),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "without weights": lambda: nn.BatchNorm2d(3, affine=False),
    "without memory": lambda: nn.BatchNorm2d(3, track_running_stats=False),
}


def normalised(norm, images, out):
    x = images.clone().requires_grad_()
    y = norm(x)
    (y * out).sum().backward()
    return y.detach(), x.grad


def drawn():
    """Far from zero: a mean square less a squared mean would lose all digits."""
    generator = torch.Generator().manual_seed(0)
    return 300 + 0.1 * torch.randn(7, 3, 4, 4, generator=generator), torch.randn(7, 3, 4, 4, generator=generator)


def statistics(rank):
    """Outputs, gradients and running statistics of batch normalisation over unequal parts."""
    part = slice(0, 5) if rank == 0 else slice(5, 7)
    images, out = drawn()
    found = {}
    for name, make in NORMS.items():
        norm = make()
        with same_statistics(norm, Ranks(dist.group.WORLD)):
            values = normalised(norm, images[part], out[part])
        found[name] = *values, norm.state_dict(), type(norm).__name__, sorted(vars(norm))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return results(__file__, tmp_path_factory)


def raised(value):
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(two, case):
    """Equal but for the order of sums. Stochastic depth and dropout are off: their draws are each process's own.

    AdamW divides by the root of a gradient's square: where that is all rounding, six steps of 1e-3 show it.
    """
    name, recipe = CASES[case]
    tolerance = 2e-3 if recipe.optimizer == "adamw" else 2e-4
    weights, history = trained(name, recipe)
    for rank in (0, 1):
        found, told = raised(two[rank][case])
        for variable in history.data_vars:
            np.testing.assert_allclose(told[variable], history[variable], rtol=2e-4, atol=1e-6, err_msg=variable)
        for key, value in weights.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-3, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert all(torch.equal(a, b) for a, b in zip(two[0][case][0].values(), two[1][case][0].values(), strict=True))
    assert two[0][case][1].attrs["ranks"] == 2


def test_parts_that_do_not_divide_are_as_many_in_both(two):
    weights = [raised(two[rank]["uneven"])[0] for rank in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))


def test_two_processes_go_on_from_a_folder(two):
    for rank in (0, 1):
        first, again, kinds = raised(two[rank]["interrupted"])
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert "_SummedBatchNorm" not in kinds


@pytest.mark.parametrize(
    ("case", "text"),
    [("refused", "recipe.lr was 0.02 and is now 0.5"), ("too_small", "image")],
    ids=["recipe", "batch"],
)
def test_mistakes_are_said_by_all(two, case, text):
    for rank in (0, 1):
        with pytest.raises(ValueError, match=text):
            raised(two[rank][case])


def test_an_error_in_one_process_ends_both(two):
    for rank in (0, 1):
        with pytest.raises(FloatingPointError, match="nan from step 1 of epoch 1"):
            raised(two[rank]["spoiled"])
    with pytest.raises(LookupError, match="no such thing"):
        raised(two[0]["failing_callback"])
    with pytest.raises(RuntimeError, match="rank 0: LookupError: no such thing"):
        raised(two[1]["failing_callback"])


def test_a_callback_that_fails_again_ends_both(two):
    with pytest.raises(LookupError, match="still no such thing"):
        raised(two[0]["again_failing"])
    with pytest.raises(RuntimeError, match="rank 0: LookupError: still no such thing"):
        raised(two[1]["again_failing"])


def test_a_callback_may_copy_and_call_the_network(two):
    assert raised(two[0]["copied"]) == [(2, 10)] and raised(two[1]["copied"]) == []


def test_parameters_without_a_gradient_are_said(two):
    for rank in (0, 1):
        with pytest.raises(ValueError, match=r"freeze them .*or train in one process"):
            raised(two[rank]["unused"])


def test_evaluation_is_over_all_images(two):
    expected = evaluate(network("vit_nano"), data().loader("test", batch_size=10))
    for rank in (0, 1):
        found = raised(two[rank]["evaluated"])
        assert found.images == expected.images == 33
        assert found.accuracy == expected.accuracy
        assert found.nll == pytest.approx(expected.nll, rel=1e-6)


@pytest.mark.parametrize("kind", NORMS)
def test_batch_normalisation_over_processes_is_that_of_all_images(two, kind):
    norm = NORMS[kind]()
    before = sorted(vars(norm))
    y, gradient = normalised(norm, *drawn())
    parts = [raised(two[rank]["statistics"])[kind] for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-2, atol=2e-2)
    for part in parts:
        for key, value in norm.state_dict().items():
            torch.testing.assert_close(part[2][key], value)
        assert part[3] == "BatchNorm2d"
        assert part[4] == before


def test_torchrun_trains_as_one_process(tmp_path):
    """The command line, through the launcher that users type."""
    settings = "--train-size 60 --test-size 33 --batch-size 24 --epochs 1 --warmup-epochs 0.5 --optimizer sgd --lr 0.02"
    arguments = ["train", "convmixer_nano", *settings.split(), "--device", "cpu", "--folder"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitprobe"]
    done = subprocess.run(
        [*launch, *arguments, tmp_path / "two"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert main([*arguments, str(tmp_path / "one")]) == 0
    one, two = (load(tmp_path / folder / "history.nc") for folder in ("one", "two"))
    np.testing.assert_allclose(two.train_loss, one.train_loss, rtol=1e-5)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["created"]["name"] == "convmixer_nano"
    assert "ranks" not in one.attrs and two.attrs["ranks"] == 2


@pytest.mark.parametrize("accumulate", [2, 3, 24])
def test_gradients_that_add_up_give_the_same_update(accumulate):
    """Of a network without batch normalisation, in double precision: to its rounding."""
    recipe = replace(BASE, epochs=1)
    whole, parts = network("vit_nano").double(), network("vit_nano").double()
    images = data()
    for model, one in ((whole, recipe), (parts, replace(recipe, accumulate=accumulate))):
        model.register_forward_pre_hook(lambda module, given: (given[0].double(),))
        fit(model, images, one, progress=False)
    for (key, a), b in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=f"{key}: {{}}".format)


def test_parts_pass_through_the_model_one_after_the_other():
    model, seen = network("vit_nano"), []
    model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])) if module.training else None)
    fit(model, data(), replace(BASE, epochs=1, accumulate=5), progress=False)
    assert seen[:5] == [5, 5, 5, 5, 4] and sum(seen) == 60


if __name__ == "__main__":
    run({
        **{case: in_two(*one) for case, one in CASES.items()},
        "interrupted": interrupted,
        "uneven": uneven,
        "refused": refused,
        "spoiled": spoiled,
        "failing_callback": failing_callback,
        "again_failing": again_failing,
        "copied": copied,
        "unused": unused,
        "too_small": too_small,
        "evaluated": evaluated,
        "statistics": statistics,
    })
