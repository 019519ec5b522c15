import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitprobe.models import create_model
from vitprobe.training import Recipe, learning_rate
from vitprobe.training.optimizer import make_optimizer, parameter_groups
from vitprobe.training.switches import set_stochastic_depth


def test_recipe_survives_json():
    recipe = Recipe(betas=(0.8, 0.95), clip=5.0, schedule="triangular", seed=7)
    assert Recipe(**json.loads(json.dumps(recipe.config()))) == recipe


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("epochs", 0, "epochs must be at least 1, not 0"),
        ("lr", 0.0, "lr must be above 0"),
        ("lr", math.nan, "lr must be above 0"),
        ("clip", 0.0, "clip must be above 0, or None"),
        ("label_smoothing", 1.0, "label_smoothing must be at least 0 and below 1"),
        ("mixup", -0.1, "mixup must be 0 or more"),
        ("mix_switch", 1.5, "mix_switch must be between 0 and 1"),
        ("stochastic_depth", 1.0, "stochastic_depth must be"),
        ("warmup_epochs", 21.0, "warmup_epochs must be at most epochs, 20, not 21.0"),
        ("min_lr", 1.0, "min_lr must be at most lr"),
        ("betas", (0.9,), "betas must be two numbers"),
        ("optimizer", "adamW", "unknown optimizer 'adamW'. Did you mean 'adam' or 'adamw'?"),
    ],
)
def test_bad_settings_are_answered_in_words(field, value, words):
    with pytest.raises(ValueError) as error:
        Recipe(**{field: value})
    assert words in str(error.value)


@pytest.mark.parametrize("value", [2.0, True, "3"])
def test_counts_must_be_integers(value):
    with pytest.raises(TypeError, match="epochs must be an integer"):
        Recipe(epochs=value)


def test_cosine_with_warmup_by_hand():
    recipe = Recipe(epochs=4, warmup_epochs=1, lr=1.0, min_lr=0.2)
    rates = [learning_rate(recipe, step, 4) for step in range(16)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(0.6)  # half way down
    assert rates[15] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 11 / 12)) / 2)


def test_triangular_and_constant_by_hand():
    triangular = Recipe(epochs=2, warmup_epochs=1, lr=1.0, schedule="triangular")
    assert [learning_rate(triangular, step, 2) for step in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    constant = Recipe(epochs=2, warmup_epochs=0, lr=0.3, schedule="constant")
    assert {learning_rate(constant, step, 5) for step in range(10)} == {0.3}


@pytest.mark.parametrize("schedule", ["cosine", "cosine_from_start", "triangular", "triangular_tail"])
@pytest.mark.parametrize("warmup", [0, 0.5, 1.3, 2])
def test_an_epoch_has_one_rate_after_the_warmup(schedule, warmup):
    recipe = Recipe(epochs=5, warmup_epochs=warmup, schedule=schedule, schedule_per="epoch", lr=1.0)
    steps = 10
    start = round(warmup * steps)
    rates = [learning_rate(recipe, step, steps) for step in range(5 * steps)]
    whole = [set(rates[epoch * steps : (epoch + 1) * steps]) for epoch in range(math.ceil(warmup), 5)]
    assert all(len(found) == 1 for found in whole) and len(set.union(*whole)) == len(whole)
    assert len(set(rates[start : math.ceil(warmup) * steps])) == (warmup % 1 > 0)
    if warmup % 1 == 0:
        by_step = Recipe(**{**recipe.config(), "schedule_per": "step"})
        first = [epoch * steps for epoch in range(math.ceil(warmup), 5)]
        assert [rates[step] for step in first] == [learning_rate(by_step, step, steps) for step in first]


@given(
    epochs=st.integers(1, 20),
    steps=st.integers(1, 50),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "constant", "triangular"]),
)
def test_rates_rise_to_the_peak_and_then_never_rise(epochs, steps, warmup, schedule):
    recipe = Recipe(epochs=epochs, warmup_epochs=warmup * epochs, schedule=schedule, lr=0.1, min_lr=0.01)
    rates = [learning_rate(recipe, step, steps) for step in range(epochs * steps)]
    assert 0 < min(rates) <= max(rates) == pytest.approx(0.1)
    peak = max(index for index, rate in enumerate(rates) if rate == max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.position = nn.Embedding(5, 4)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.convolution = nn.Conv2d(3, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_only_matrices_decay():
    model = Tokens()
    decayed, free = parameter_groups(model, Recipe(decay="matrices", weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0
    assert {names[id(parameter)] for parameter in decayed["params"]} == {
        "convolution.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    assert len(decayed["params"]) + len(free["params"]) == trainable


def test_a_module_says_which_of_its_parameters_are_matrices():
    """ConViT's position vectors are a layer's weight in the published code, and its gates are no matrix."""
    model = create_model("convit_nano", image_size=8, channels=1, seed=0)
    decayed, free = parameter_groups(model, Recipe(decay="matrices"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = [{names[id(one)].rpartition(".")[2] for one in group["params"]} for group in (decayed, free)]
    assert "vector" in kinds[0] and "vector" not in kinds[1] and "gate" in kinds[1]
    foreign = nn.Linear(2, 2)
    foreign.matrices = nn.ParameterList([nn.Parameter(torch.ones(2))])  # somebody else's word
    assert len(parameter_groups(foreign, Recipe(decay="matrices"))[0]["params"]) == 1


def test_all_decay_in_one_group():
    (group,) = parameter_groups(Tokens(), Recipe(decay="all"))
    assert group["weight_decay"] == 0.05 and len(group["params"]) == 11


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizers(name, kind):
    optimizer = make_optimizer(nn.Linear(2, 2), Recipe(optimizer=name, momentum=0.7, betas=(0.5, 0.6)))
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0.7) == 0.7
    assert optimizer.defaults.get("betas", (0.5, 0.6)) == (0.5, 0.6)


def test_stochastic_depth_grows_linearly_in_torchvision_and_timm():
    import timm
    import torchvision

    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, drop_path_rate=0.1)
    set_stochastic_depth(vit, 0.3)
    found = [module.drop_prob for module in vit.modules() if type(module).__name__ == "DropPath"]
    assert found == pytest.approx([0.3 * i / (len(found) - 1) for i in range(len(found))])
    swin = torchvision.models.swin_t(num_classes=10)
    set_stochastic_depth(swin, 0.3)
    found = [module.p for module in swin.modules() if type(module).__name__ == "StochasticDepth"]
    assert len(found) == 12  # one per block, used by both of its branches
    assert found == pytest.approx([0.3 * i / 11 for i in range(12)])
    set_stochastic_depth(swin, 0.0)
    assert all(module.p == 0 for module in swin.modules() if type(module).__name__ == "StochasticDepth")


def test_stochastic_depth_needs_something_to_drop():
    set_stochastic_depth(nn.Linear(2, 2), 0.0)
    with pytest.raises(ValueError, match="no StochasticDepth or DropPath"):
        set_stochastic_depth(nn.Linear(2, 2), 0.1)
