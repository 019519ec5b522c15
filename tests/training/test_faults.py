"""What can go wrong while a training runs: it is never lost, and never another one in silence."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import StopError, make_data, numbers, same_weights, stop_after, tiny
from torch.optim.optimizer import register_optimizer_step_post_hook
from two_ranks import once

from vitprobe.data import load_data
from vitprobe.initializers import mimetic_
from vitprobe.models import create_model
from vitprobe.training import FolderBusyError, Recipe, fit, load_snapshot
from vitprobe.training.checkpoint import digest
from vitprobe.training.folder import in_use, only_one

HERE = Path(__file__).parent
RECIPE = Recipe(epochs=3, batch_size=16, lr=0.01, mixup=1.0, cutmix=1.0, label_smoothing=0.1, augment="flip")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Everything that `killed.py` tried, in a process of its own: a copy of one with threads would not be safe."""

    def run(folder):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        command = [sys.executable, HERE / "killed.py", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder / "found.json").write_text(done.stdout)

    return json.loads((once("killed", run, tmp_path_factory) / "found.json").read_text())


@pytest.mark.parametrize("place", ["step", "before a replacement", "after a replacement", "write"])
def test_killed_anywhere_it_ends_as_if_nothing_had_happened(killed, place):
    tried = [one for one in killed if one["place"] == place]
    assert len(tried) >= 5
    assert all(one["killed"] for one in tried), [one["number"] for one in tried if not one["killed"]]
    assert all(one["same"] for one in tried), [one["number"] for one in tried if not one["same"]]
    assert not any(one["left over"] for one in tried)


def test_a_full_disk_keeps_the_last_epoch_and_says_what_to_do(tmp_path):
    """The limit on a file's size makes a write fail as a full disk does: in the middle."""
    whole = tiny()
    expected = fit(whole, make_data(), RECIPE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(model, row):
        if row["epoch"] == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))

    try:
        with pytest.raises(OSError, match=r"epoch 2 cannot be saved .*make room.*goes on from epoch 1"):
            fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=fill, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1
    assert not list(tmp_path.rglob("*.tmp"))
    resumed = tiny()
    assert numbers(fit(resumed, make_data(), RECIPE, folder=tmp_path)).equals(numbers(expected))
    assert same_weights(whole, resumed)


def flip_a_bit(path):
    """In the numbers, not in the file's own bookkeeping: the file can still be read."""
    content = torch.load(path, weights_only=True)
    weights = content["model"]["head.2.weight"]
    raw = bytearray(path.read_bytes())
    place = raw.find(weights.numpy().tobytes()[:64])
    assert place > 0
    raw[place + 10] ^= 1
    path.write_bytes(raw)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["head.2.weight"], weights)


def test_a_single_wrong_bit_is_noticed(tmp_path):
    whole = tiny()
    expected = fit(whole, make_data(), RECIPE)
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2))
    flip_a_bit(tmp_path / "checkpoint.pt")
    resumed = tiny()
    with pytest.warns(UserWarning, match=r"checkpoint.pt .* is damaged.*epoch 1"):
        found = fit(resumed, make_data(), RECIPE, folder=tmp_path)
    assert numbers(found).equals(numbers(expected))
    assert same_weights(whole, resumed)


def test_the_checksum_is_of_the_content():
    content = {"a": torch.arange(3.0), "b": [1, "x", None], "c": {"d": 2.5}}
    same = {"a": torch.arange(3.0).clone(), "b": [1, "x", None], "c": {"d": 2.5}}
    assert digest(content) == digest(same)
    others = [
        {**content, "a": torch.tensor([0.0, 1.0, 2.0000002])},
        {**content, "a": torch.arange(3.0).double()},
        {**content, "a": torch.arange(3.0)[None]},
        {**content, "b": [1, "x"]},
        {"a": torch.arange(3.0), "c": {"d": 2.5}, "b": [1, "x", None], "e": 0},
    ]
    assert len({digest(one) for one in [content, *others]}) == 6


def test_the_second_in_a_folder_is_told_who_is_there(tmp_path):
    with only_one(tmp_path):
        assert in_use(tmp_path) == f"process {os.getpid()} on {os.uname().nodename}"
        with pytest.raises(FolderBusyError, match=rf"in use by process {os.getpid()} on .*another folder"):
            fit(tiny(), make_data(), RECIPE, folder=tmp_path)
    assert in_use(tmp_path) == ""
    fit(tiny(), make_data(), RECIPE, folder=tmp_path)


def test_the_second_can_wait_and_gets_what_the_first_made(tmp_path):
    first, second = tiny(), tiny()
    started, histories = threading.Event(), []

    def wait(model, row):
        if row["epoch"] == 1:
            started.set()
            time.sleep(0.3)

    def follow():
        started.wait()
        histories.append(fit(second, make_data(), RECIPE, folder=tmp_path, when_busy="wait", on_epoch=stop_after(1)))

    thread = threading.Thread(target=follow)
    thread.start()
    expected = fit(first, make_data(), RECIPE, folder=tmp_path, on_epoch=wait)
    thread.join()
    assert histories[0].to_dataframe().equals(expected.to_dataframe())
    assert same_weights(first, second)


def test_a_dead_process_leaves_the_folder_free(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from vitprobe.training.folder import only_one\n"
        "with only_one(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    with pytest.raises(FolderBusyError, match=f"process {process.pid} on"):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    fit(tiny(), make_data(), RECIPE, folder=tmp_path)


def test_an_epoch_whose_callback_failed_is_told_again(tmp_path):
    seen = []

    def fail_once(model, row):
        seen.append(row["epoch"])
        if seen == [1, 2]:
            raise StopError

    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=fail_once)
    fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=fail_once)
    fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=fail_once)  # finished
    assert seen == [1, 2, 2, 3]


def test_snapshots_are_the_weights_of_their_epochs(tmp_path):
    recipe = Recipe(**{**RECIPE.config(), "snapshots": (0, 2)})
    seen = {0: tiny().state_dict()}
    model = tiny()
    fit(
        model,
        make_data(),
        recipe,
        folder=tmp_path,
        on_epoch=lambda model, row: seen.update({row["epoch"]: {k: v.clone() for k, v in model.state_dict().items()}}),
    )
    for epoch in (0, 2):
        again = tiny(seed=7)
        load_snapshot(again, tmp_path, epoch)
        assert all(torch.equal(value, seen[epoch][name]) for name, value in again.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"no snapshot of epoch 1, but of \[0, 2\]"):
        load_snapshot(model, tmp_path, 1)
    with pytest.raises(ValueError, match=r"keeps snapshots of epochs 0, 2: give folder="):
        fit(tiny(), make_data(), recipe)


def test_snapshots_of_a_start_that_was_given_up_are_not_kept(tmp_path):
    """Killed between a snapshot and its checkpoint, the folder has one of epoch 1; another recipe may begin there."""
    recipe = Recipe(**{**RECIPE.config(), "snapshots": (1, 2)})
    fit(tiny(), make_data(), recipe, folder=tmp_path)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / name).unlink()
    other = Recipe(**{**recipe.config(), "lr": 0.02, "snapshots": (1,)})
    seen = {}
    fit(
        tiny(),
        make_data(),
        other,
        folder=tmp_path,
        on_epoch=lambda model, row: seen.setdefault(row["epoch"], model.state_dict()["head.2.weight"].clone()),
    )
    assert [file.name for file in (tmp_path / "snapshots").iterdir()] == ["epoch_0001.pt"]
    again = tiny(seed=7)
    load_snapshot(again, tmp_path, 1)
    assert torch.equal(again.head[2].weight, seen[1])


def test_another_network_in_a_folder_is_refused(tmp_path):
    """Of the same weights' shapes: what differs is how many heads they are shared out to, or what wrote them."""
    data = load_data("digits", train_size=60, test_size=20)
    recipe = Recipe(epochs=1, batch_size=20)

    def network(**options):
        return create_model("vit_nano", image_size=8, channels=1, num_classes=10, seed=0, **options)

    fit(network(heads=2), data, recipe, folder=tmp_path)
    with pytest.raises(ValueError, match=r"another network: network\.created\.heads was 2 and is now 4"):
        fit(network(heads=4), data, recipe, folder=tmp_path)
    written = network(heads=2)
    mimetic_(written, seed=0)
    with pytest.raises(ValueError, match=r"another network: network\.initialisation"):
        fit(written, data, recipe, folder=tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["created"]["heads"] == 2


def test_a_wrapped_or_compiled_network_goes_on(tmp_path):
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(1))
    whole, wrapped = tiny(), torch.nn.DataParallel(tiny())
    fit(whole, make_data(), RECIPE)
    fit(wrapped, make_data(), RECIPE, folder=tmp_path)
    assert same_weights(whole, wrapped.module)


def test_buffers_may_be_infinite_and_networks_have_attributes(tmp_path):
    """A mask of -inf is no spoiled weight, and an attribute of somebody else's is not ours."""
    model = tiny()
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    model.created = object()
    fit(model, make_data(), Recipe(epochs=1, batch_size=16), folder=tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["created"] is None


def test_what_is_no_recipe_and_whole_numbers_of_other_kinds():
    with pytest.raises(TypeError, match=r"make_recipe\('park_kim_weak'\)"):
        fit(tiny(), make_data(), "park_kim_weak")
    assert Recipe(epochs=np.int64(3)).config()["epochs"] == 3


def test_a_line_per_epoch_where_there_is_no_terminal(tmp_path, capsys):
    fit(tiny(), make_data(), RECIPE)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    fit(tiny(), make_data(), RECIPE, progress=False)
    assert capsys.readouterr().err == ""


def test_weights_that_the_last_step_spoiled_are_not_saved(tmp_path):
    """The loss of the last step is that before it: only a look at the weights shows what it did to them."""
    model = tiny()

    def spoil(optimizer, positional, named, steps=[]):  # noqa: B006  (counts)
        steps.append(1)
        if len(steps) == 6:  # the last of epoch 2
            model.head[2].bias.data.fill_(float("inf"))

    handle = register_optimizer_step_post_hook(spoil)
    try:
        with pytest.raises(FloatingPointError, match=r"head.2.bias is no longer finite .* of epoch 2.*epoch is 1"):
            fit(model, make_data(), RECIPE, folder=tmp_path)
    finally:
        handle.remove()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1
    whole, resumed = tiny(), tiny()
    fit(whole, make_data(), RECIPE)
    fit(resumed, make_data(), RECIPE, folder=tmp_path)
    assert same_weights(whole, resumed)


def test_a_loss_that_is_not_finite_stops_at_once():
    """On a CPU the very step is the last one, not that of the epoch's end."""
    model = tiny()
    calls = []

    def spoil(module, given):
        calls.append(1)
        if len(calls) == 2:
            module.stem[0].weight.data.fill_(float("nan"))

    model.register_forward_pre_hook(spoil)
    with pytest.raises(FloatingPointError, match=r"nan from step 2 of epoch 1 on \(step 2 of the run\)"):
        fit(model, make_data(), RECIPE)
    assert len(calls) == 2


def test_other_initial_weights_in_a_folder_are_refused(tmp_path):
    """The folder says what its training started from; what it was given last is not it."""
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(1))
    with pytest.raises(ValueError, match=r"another start: start\.weights was"):
        fit(tiny(seed=5), make_data(), RECIPE, folder=tmp_path)
    with pytest.raises(ValueError, match=r"another start: start\.epochs_before was 0 and is now 2"):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, epochs_before=2)
    whole, again = tiny(), tiny()
    fit(whole, make_data(), RECIPE)
    fit(again, make_data(), RECIPE, folder=tmp_path)
    assert same_weights(whole, again)
    with pytest.raises(ValueError, match="another start"):  # nor are they in a finished one
        fit(tiny(seed=5), make_data(), RECIPE, folder=tmp_path)
    fit(again, make_data(), RECIPE, folder=tmp_path)  # what it ended with is no other training


def test_the_network_of_an_interrupted_training_goes_on_as_it_is(tmp_path):
    """As in a notebook, whose network stands in the middle of an epoch then."""
    model, whole = tiny(), tiny()
    handle = model.branch.register_forward_pre_hook(interrupt_at(7))  # the second step of epoch 2
    with pytest.raises(KeyboardInterrupt):
        fit(model, make_data(), RECIPE, folder=tmp_path)
    handle.remove()
    fit(model, make_data(), RECIPE, folder=tmp_path)
    fit(whole, make_data(), RECIPE)
    assert same_weights(whole, model)


def interrupt_at(call, calls=0):
    def count(*_):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    return count


def test_initial_weights_that_are_computed_anew_go_by_their_name(tmp_path):
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, initial="a fit", on_epoch=stop_after(1))
    with pytest.raises(ValueError, match=r"start\.weights was 'a fit' and is now 'another'"):
        fit(tiny(seed=5), make_data(), RECIPE, folder=tmp_path, initial="another")
    fit(tiny(seed=5), make_data(), RECIPE, folder=tmp_path, initial="a fit")


def test_a_checkpoint_from_before_it_said_its_start_goes_on(tmp_path):
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(1))
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({key: content[key] for key in content if key not in ("start", "sha256")}, tmp_path / "checkpoint.pt")
    whole, resumed = tiny(), tiny(seed=5)
    with pytest.raises(StopError):
        fit(resumed, make_data(), RECIPE, folder=tmp_path, on_epoch=stop_after(2))
    resumed = tiny(seed=6)
    fit(resumed, make_data(), RECIPE, folder=tmp_path)
    fit(whole, make_data(), RECIPE)
    assert same_weights(whole, resumed)


def test_a_damaged_snapshot_is_noticed(tmp_path):
    recipe = Recipe(**{**RECIPE.config(), "epochs": 1, "snapshots": (0, 1)})
    fit(tiny(), make_data(), recipe, folder=tmp_path)
    flip_a_bit(tmp_path / "snapshots" / "epoch_0001.pt")
    with pytest.raises(ValueError, match=r"epoch_0001.pt is damaged, its checksum is another"):
        load_snapshot(tiny(), tmp_path, 1)
    old = torch.load(tmp_path / "snapshots" / "epoch_0000.pt", weights_only=True)
    del old["sha256"]  # as they were before
    torch.save(old, tmp_path / "snapshots" / "epoch_0000.pt")
    again = tiny(seed=7)
    load_snapshot(again, tmp_path, 0)
    assert same_weights(again, tiny())


def test_a_finished_training_needs_no_optimiser_and_an_unfinished_one_the_same(tmp_path):
    """The parameters that decay by `decay="matrices"` became more: what is trained stays."""
    recipe = Recipe(**{**RECIPE.config(), "decay": "matrices"})
    whole = tiny()
    fit(whole, make_data(), recipe, folder=tmp_path)
    for epoch in (3, 2):
        content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        first, second = content["optimizer"]["param_groups"]
        second["params"].append(first["params"].pop())
        content |= {"epoch": epoch, "history": content["history"][:epoch]}
        torch.save({key: content[key] for key in content if key != "sha256"}, tmp_path / "checkpoint.pt")
        again = tiny()
        if epoch == 3:
            fit(again, make_data(), recipe, folder=tmp_path)
            assert same_weights(whole, again)
        else:
            with pytest.raises(ValueError, match=r"optimiser is of other parameters.*or delete the folder"):
                fit(again, make_data(), recipe, folder=tmp_path)


def test_one_image_alone_in_a_batch_says_which_size_to_change():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"41 training images in batches of 20 .*use e\.g\. batch_size=21, or another"):
        fit(model, make_data(), Recipe(epochs=1, batch_size=20))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file, and a training needs a folder"):
        fit(tiny(), make_data(), RECIPE, folder=tmp_path / "file")
