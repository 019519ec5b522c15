"""Hard distillation against its definition."""

import copy
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from tiny import StopError, make_data, stop_after, tiny
from torch import nn

from vitprobe.models import create_model
from vitprobe.training import Recipe, fit

RECIPE = Recipe(epochs=2, batch_size=16, lr=0.01, distillation=0.5, label_smoothing=0.1, mixup=1.0)


class Two(nn.Module):
    """A head for labels and one for the teacher, as DeiT's distilled networks have; their mean in evaluation."""

    def __init__(self):
        super().__init__()
        self.label, self.taught = nn.Linear(36, 3), nn.Linear(36, 3)

    def forward(self, x):
        label, taught = self.label(x.flatten(1)), self.taught(x.flatten(1))
        return (label, taught) if self.training else (label + taught) / 2


class Always(nn.Module):
    """Decides for class 2, and remembers whether it was asked in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, 0.0, 1.0]))
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        return self.bias.expand(len(x), -1)


def test_two_heads_learn_from_two_teachers():
    """The label's head gets half the labels' gradient alone, the other half the teacher's: one step by hand."""
    data = make_data(train=16)
    recipe = Recipe(epochs=1, batch_size=16, optimizer="sgd", momentum=0.0, weight_decay=0.0, lr=0.5, warmup_epochs=0)
    torch.manual_seed(0)
    model = Two()
    expected = Two()
    expected.load_state_dict(model.state_dict())
    history = fit(model, data, replace(recipe, distillation=0.25), teacher=Always(), progress=False)
    images, labels = next(iter(data.loader("train", batch_size=16, seed=0)))
    label, taught = expected.train()(images)
    losses = F.cross_entropy(label, labels), F.cross_entropy(taught, torch.full_like(labels, 2))
    (0.75 * losses[0] + 0.25 * losses[1]).backward()
    for parameter, other in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, parameter - 0.5 * parameter.grad)
    assert history.train_loss.item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert history.distillation_loss.item() == pytest.approx(losses[1].item(), rel=1e-5)


def test_one_head_learns_the_mixture():
    """A network with one head gets targets that are the teacher's decision in that share."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    recipe = replace(RECIPE, epochs=30, distillation=1.0)
    fit(model, make_data(train=120), recipe, teacher=Always(), progress=False)
    images, _ = next(iter(make_data().loader("test")))
    assert (model(images).argmax(1) == 2).all()


def test_one_head_takes_a_step_towards_both():
    data = make_data(train=16)
    recipe = Recipe(epochs=1, batch_size=16, optimizer="sgd", momentum=0.0, weight_decay=0.0, lr=0.5, warmup_epochs=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    expected = copy.deepcopy(model)
    fit(model, data, replace(recipe, distillation=0.25), teacher=Always(), progress=False)
    images, labels = next(iter(data.loader("train", batch_size=16, seed=0)))
    logits = expected(images)
    losses = F.cross_entropy(logits, labels), F.cross_entropy(logits, torch.full_like(labels, 2))
    (0.75 * losses[0] + 0.25 * losses[1]).backward()
    for parameter, other in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, parameter - 0.5 * parameter.grad)


def timms():
    deit = {"img_size": 6, "patch_size": 3, "in_chans": 1, "num_classes": 3, "embed_dim": 12, "depth": 1}
    return timm.create_model("deit_tiny_distilled_patch16_224", num_heads=2, **deit)


def ours():
    return create_model("vit_nano", image_size=6, channels=1, num_classes=3, pool="class", distilled=True, seed=0)


@pytest.mark.parametrize(("make", "heads"), [(timms, ("head_dist", "head")), (ours, ("distilled_head", "head"))])
def test_a_distillation_token_is_told(make, heads):
    """Such networks give both outputs in training only where they are told to."""
    model = make()
    taught, label = (getattr(model, head) for head in heads)
    before = taught.weight.clone(), label.weight.clone()
    recipe = replace(RECIPE, distillation=1.0, weight_decay=0.0, epochs=1)
    fit(model, make_data(), recipe, teacher=Always(), progress=False)
    assert not torch.equal(taught.weight, before[0]) and torch.equal(label.weight, before[1])
    assert not model.distilled_training


def test_the_teacher_stays_what_it_is():
    teacher = Always().train()
    fit(tiny(), make_data(), RECIPE, teacher=teacher, progress=False)
    assert teacher.training and not any(teacher.modes) and len(teacher.modes) == 6
    assert torch.equal(teacher.bias, torch.tensor([0.0, 0.0, 1.0])) and teacher.bias.grad is None


def test_a_recipe_that_distils_and_a_teacher_belong_together():
    with pytest.raises(ValueError, match=r"distillation=0.5\) and there is no teacher: give teacher="):
        fit(tiny(), make_data(), RECIPE)
    model = tiny()
    with pytest.raises(ValueError, match="its own teacher"):
        fit(model, make_data(), RECIPE, teacher=model)
    with pytest.raises(ValueError, match="there is a teacher, and the recipe does not distil"):
        fit(tiny(), make_data(), replace(RECIPE, distillation=0.0), teacher=Always())


def test_another_teacher_is_another_training(tmp_path):
    with pytest.raises(StopError):
        fit(tiny(), make_data(), RECIPE, teacher=Always(), folder=tmp_path, on_epoch=stop_after(1))
    other = Always()
    other.bias.data[0] = 2.0
    with pytest.raises(ValueError, match=r"another teacher: teacher\.weights was"):
        fit(tiny(), make_data(), RECIPE, teacher=other, folder=tmp_path)
    history = fit(tiny(), make_data(), RECIPE, teacher=Always(), folder=tmp_path)
    assert len(history.attrs["teacher"]) == 64
