"""Trains in child processes that are killed at every step and in the middle of every write, and goes on in new ones.

    python killed.py FOLDER

Prints JSON: for each place of the kill, whether the child died there, and whether the resumed training ended with the
very weights and history of the uninterrupted one.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from tiny import make_data, numbers, tiny

from vitprobe.training import Recipe, fit
from vitprobe.training.checkpoint import digest

RECIPE = Recipe(
    epochs=3,
    batch_size=16,
    lr=0.01,
    mixup=1.0,
    cutmix=1.0,
    label_smoothing=0.1,
    augment="flip",
    stochastic_depth=0.5,
    snapshots=(0, 2),
)


def outcome(folder, model):
    history = fit(model, make_data(), RECIPE, folder=folder, progress=False)
    return digest(model.state_dict()) + digest(numbers(history).to_dict())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def counted(action, number, before=True):
    """The action, which dies at its call of that number, before or after it does its work."""
    calls = 0

    def call(*positional, **named):
        nonlocal calls
        calls += 1
        if calls == number and before:
            die()
        result = action(*positional, **named)
        if calls == number:
            die()
        return result

    return call


def half(action, number):
    """`torch.save`, which dies when half of its call of that number is on the disk."""
    calls = 0

    def call(content, file):
        nonlocal calls
        calls += 1
        action(content, file)
        if calls == number:
            file.truncate(file.tell() // 2)
            file.flush()
            die()

    return call


def child(folder, place, number):
    """What a killed process does."""
    model = tiny()
    if place == "step":
        model.register_forward_pre_hook(counted(lambda *_: None, number))
    elif place == "write":
        torch.save = half(torch.save, number)
    else:
        os.replace = counted(os.replace, number, before=place == "before a replacement")
    outcome(folder, model)


def in_a_child(action):
    """The exit status of a copy of this process that does something and ends."""
    process = os.fork()
    if process == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1]


def main(root):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    expected = outcome(root / "whole", tiny())
    places = [("step", number) for number in range(1, 16)]  # of 3 epochs: 9 steps and 6 batches of test images
    places += [(place, number) for place in ("before a replacement", "after a replacement") for number in range(1, 11)]
    places += [("write", number) for number in range(1, 6)]
    found = []
    for place, number in places:
        folder = root / f"{place} {number}"
        status = in_a_child(lambda: child(folder, place, number))  # noqa: B023  (called at once)
        again = outcome(folder, tiny())
        found.append({
            "place": place,
            "number": number,
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "same": again == expected,
            "left over": [file.name for file in folder.rglob("*.tmp")],
        })
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
