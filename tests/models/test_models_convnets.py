import pytest
import torch
import torch.nn.functional as F

from vitprobe.models import create_model
from vitprobe.models.alternet import WindowAttentionBlock, attention_places
from vitprobe.models.resnet import PreActivationBlock


def millions(name, **options):
    with torch.device("meta"):
        model = create_model(name, num_classes=100, **options)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_ti", dict(patch_size=2), 5.403),
        ("vit_ti", dict(patch_size=4), 5.373),
        ("vit_s", dict(patch_size=2), 21.42),
        ("vit", dict(patch_size=2, dim=768, heads=12), 85.31),
        ("preact_resnet50", dict(), 23.698),
        ("preact_resnet50", dict(blocks=(3, 4, 6, 4)), 28.160),
        ("alternet50", dict(attentions=(0, 0, 0, 0)), 28.160),
        ("alternet50", dict(), 33.013),
        (
            "alternet",
            dict(widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), attentions=(0, 1, 1, 1), bottleneck=1),
            9.499,
        ),
    ],
)
def test_parameter_counts_of_the_papers(name, options, expected):
    """Park & Kim 2022, CIFAR-100 [million parameters]."""
    decimals = len(str(expected).partition(".")[2])
    assert millions(name, **options) == pytest.approx(expected, abs=0.51 * 10**-decimals)


@pytest.mark.parametrize(
    ("stage", "convolution", "attention"), [(1, 0.280, 0.411), (2, 1.117, 1.642), (3, 4.463, 6.561)]
)
def test_cost_of_an_attention_block(stage, convolution, attention):
    attentions = [int(i == stage) for i in range(4)]
    difference = millions("alternet50", attentions=attentions) - millions("alternet50", attentions=(0, 0, 0, 0))
    assert difference == pytest.approx(attention - convolution, abs=1.1e-3)


def preact_reference(state, x, *, blocks, bottleneck, training):
    """The network as a function of its weights."""

    def norm(name, x):
        statistics = (None, None) if training else (state[name + ".running_mean"], state[name + ".running_var"])
        return F.batch_norm(x, *statistics, state[name + ".weight"], state[name + ".bias"], training=training)

    x = F.conv2d(x, state["stem.weight"], padding=1)
    for stage, count in enumerate(blocks):
        for index in range(count):
            name = f"stages.{stage}.{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            activated = norm(name + ".norm", x).relu()
            if bottleneck == 1:
                y = F.conv2d(activated, state[name + ".branch.0.weight"], stride=stride, padding=1)
                y = norm(name + ".branch.1", y).relu()
                y = F.conv2d(y, state[name + ".branch.3.weight"], padding=1)
            else:
                y = F.conv2d(activated, state[name + ".branch.0.weight"])
                y = norm(name + ".branch.1", y).relu()
                y = F.conv2d(y, state[name + ".branch.3.weight"], stride=stride, padding=1)
                y = norm(name + ".branch.4", y).relu()
                y = F.conv2d(y, state[name + ".branch.6.weight"])
            shortcut = name + ".shortcut.weight"
            x = y + (F.conv2d(activated, state[shortcut], stride=stride) if shortcut in state else x)
    return F.linear(norm("norm", x).relu().mean((2, 3)), state["head.weight"], state["head.bias"])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bottleneck", [1, 4])
def test_preact_resnet_by_hand(bottleneck, training):
    torch.manual_seed(0)
    blocks = (1, 2, 1)
    model = create_model("preact_resnet", widths=(8, 16, 16), blocks=blocks, bottleneck=bottleneck).double()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.2 * torch.rand_like(tensor))
    x = torch.randn(4, 3, 10, 14, dtype=torch.float64)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    # A shortcut has weights only where the shape changes: stem to stage 1 (bottleneck), and every halving.
    assert sum("shortcut" in key for key in state) == 2 + (bottleneck == 4)
    expected = preact_reference(state, x, blocks=blocks, bottleneck=bottleneck, training=training)
    torch.testing.assert_close(model.train(training)(x), expected)


@pytest.mark.parametrize(
    ("blocks", "attentions", "places"),
    [(3, 0, "CCC"), (4, 1, "CCCA"), (6, 1, "CCCCCA"), (6, 3, "CACACA"), (4, 2, "CACA"), (2, 1, "CA"), (0, 0, "")],
)
def test_attention_places(blocks, attentions, places):
    assert ["CA"[flag] for flag in attention_places(blocks, attentions)] == list(places)


def test_attention_places_refuse_too_many():
    with pytest.raises(ValueError, match="a stage of 5 blocks takes at most 2"):
        attention_places(5, 3)


def test_alternet50_is_laid_out_as_published():
    with torch.device("meta"):
        model = create_model("alternet50")
    kinds = {PreActivationBlock: "C", WindowAttentionBlock: "A"}
    assert ["".join(kinds[type(block)] for block in stage) for stage in model.stages] == [
        "CCC",
        "CCCA",
        "CCCCCA",
        "CACA",
    ]
    attentions = [block.attention for block in model.modules() if isinstance(block, WindowAttentionBlock)]
    assert [attention.heads for attention in attentions] == [6, 12, 24, 24]
    assert {tuple(attention.position.table.shape) for attention in attentions} == {(1, 7, 7)}
    assert {attention.scale for attention in attentions} == {64**-0.5}


@pytest.mark.parametrize(("size", "window"), [((4, 6), 2), ((3, 6), 3), ((2, 4), 1), ((4, 4), 4)])
def test_window_attention_is_masked_global_attention(size, window):
    torch.manual_seed(0)
    heads, width = 2, 3
    block = WindowAttentionBlock(8, inner=4, heads=heads, head_dim=width, window=window).double().eval()
    for tensor in block.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor))
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    attention = block.attention

    def normed(norm, x):
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)

    reduced = normed(block.reduced_norm, F.conv2d(F.gelu(normed(block.norm, x)), block.reduce.weight))
    tokens = reduced.flatten(2).mT
    places = [divmod(token, size[1]) for token in range(size[0] * size[1])]
    bias = torch.full((len(places),) * 2, -torch.inf, dtype=torch.float64)
    for query, (y, x_) in enumerate(places):
        for key, (y_key, x_key) in enumerate(places):
            if (y // window, x_ // window) == (y_key // window, x_key // window):
                bias[query, key] = attention.position.table[0, y_key - y + window - 1, x_key - x_ + window - 1]
    queries, keys = attention.query_key(tokens).split(heads * width, dim=-1)
    values = attention.value(tokens)
    mixed = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        logits = queries[..., part] @ keys[..., part].mT / width**0.5 + bias
        mixed.append(logits.softmax(-1) @ values[..., part])
    expected = x + attention.project(torch.cat(mixed, dim=-1)).mT.unflatten(2, size)
    torch.testing.assert_close(block(x), expected)


def test_window_that_does_not_divide_names_those_that_do():
    block = WindowAttentionBlock(8, inner=4, heads=2, head_dim=4, window=5)
    with pytest.raises(
        ValueError, match=r"window=5 does not divide a map of 8x12; use window=4 \(possible: \[1, 2, 4]"
    ):
        block(torch.zeros(1, 8, 8, 12))
