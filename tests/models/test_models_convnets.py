import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision

from vitprobe.models import create_model
from vitprobe.models.alternet import WindowAttentionBlock, attention_places
from vitprobe.models.resnet import PreActivationBlock, Smoothing
from vitprobe.probes import feature_variance, fourier


def millions(name, **options):
    with torch.device("meta"):
        model = create_model(name, **{"num_classes": 100, **options})
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_ti", dict(patch_size=2), 5.403),
        ("vit_ti", dict(patch_size=4), 5.373),
        ("vit_s", dict(patch_size=2), 21.42),
        ("vit", dict(patch_size=2, dim=768, heads=12), 85.31),
        ("resnet50", dict(), 23.705),
        ("resnext50", dict(), 23.177),
        ("preact_resnet50", dict(), 23.698),
        ("preact_resnet50", dict(blocks=(3, 4, 6, 4)), 28.160),
        ("preact_resnet50_3464", dict(), 28.160),
        ("alternet50", dict(attentions=(0, 0, 0, 0)), 28.160),
        ("alternet50", dict(), 33.013),
        ("alternet18", dict(), 9.499),
        ("alternet50_imagenet", dict(num_classes=1000), 35.915),
    ],
)
def test_parameter_counts_of_the_papers(name, options, expected):
    """Park & Kim 2022, CIFAR-100 unless said [million parameters]."""
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


def scattered_(model):
    """Random norms and biases, wide enough for a missing one to show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # scattered kernels would overflow 50 layers
                tensor.add_(0.2 * torch.rand_like(tensor))
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "theirs"), [("resnet18", "resnet18"), ("resnet50", "resnet50"), ("resnext50", "resnext50_32x4d")]
)
def test_resnets_of_torchvision(name, theirs, training):
    theirs = scattered_(torchvision.models.get_model(theirs, num_classes=10)).train(training)
    ours = create_model(name, stem="imagenet").train(training)
    # Both list their layers in the order of the forward pass, shortcuts after the branch.
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 64, 96)
    expected = theirs(x)
    assert expected.std() > 0.05
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_cifar_stem_keeps_every_position():
    """The same network as torchvision's once its 7x7 stem and pooling are a 3x3 stem."""
    theirs = torchvision.models.resnet18(num_classes=10)
    theirs.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = torch.nn.Identity()
    theirs = scattered_(theirs).eval()
    ours = create_model("resnet18").eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 16, 24)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_imagenet_stem_before_activation():
    """A convolution and a pooling, without norm: the rest sees a map of a quarter the side."""
    torch.manual_seed(0)
    options = dict(widths=(8, 16), blocks=(1, 1), seed=0)
    model = create_model("preact_resnet", stem="imagenet", **options).eval()
    small = create_model("preact_resnet", **options).eval()
    small.load_state_dict({**model.state_dict(), "stem.weight": small.stem.weight})
    x = torch.randn(2, 3, 32, 40)
    stream = F.max_pool2d(F.conv2d(x, model.stem.weight, stride=2, padding=3), 3, stride=2, padding=1)
    small.stem = torch.nn.Identity()
    assert stream.shape == (2, 8, 8, 10)
    torch.testing.assert_close(model(x), small(stream))


@pytest.mark.parametrize("bounded", [False, True])
def test_smoothing_by_a_convolution(bounded):
    x = 20 * torch.randn(2, 5, 4, 7, dtype=torch.float64)
    kernel = torch.full((5, 1, 2, 2), 0.25, dtype=torch.float64)
    before = (10 * (x / 10).tanh()).clamp(min=0) if bounded else x
    out = Smoothing(bounded=bounded)(x)
    assert out.shape == (2, 5, 5, 8)
    torch.testing.assert_close(out, F.conv2d(before, kernel, padding=1, groups=5))


def test_box_blur_keeps_the_grid_and_a_constant_map():
    x = torch.randn(2, 5, 4, 7, dtype=torch.float64)
    box = Smoothing(keeps_grid=True)
    rows, columns = (torch.arange(side + 1).clamp(max=side - 1) for side in (4, 7))
    repeated = x[:, :, rows][..., columns]
    kernel = torch.full((5, 1, 2, 2), 0.25, dtype=torch.float64)
    torch.testing.assert_close(box(x), F.conv2d(repeated, kernel, groups=5))
    assert torch.equal(box(torch.full((1, 1, 3, 3), 7.0)), torch.full((1, 1, 3, 3), 7.0))


def copied_then_blurred(channels: int) -> torch.nn.Sequential:
    """A layer whose output is its input, and a box blur."""
    copy = torch.nn.Conv2d(channels, channels, 1, bias=False)
    torch.nn.init.dirac_(copy.weight)
    return torch.nn.Sequential(copy, Smoothing(keeps_grid=True)).double()


def test_box_blur_lets_through_the_cosines_of_half_the_frequencies():
    """Noise whose last row and column are the first again: what the blur sees beyond the edge is then periodic."""
    x = torch.randn(6, 3, 16, 16, dtype=torch.float64)
    x[..., -1, :] = x[..., 0, :]
    x[..., -1] = x[..., 0]
    model = copied_then_blurred(3)
    half = torch.pi * torch.fft.fftfreq(16, dtype=torch.float64)
    passed = half.cos()[:, None] * half.cos()[None]
    torch.testing.assert_close(torch.fft.fft2(model(x)).abs(), passed * torch.fft.fft2(x).abs())
    ds = fourier(model, x, layers=["0", "1"], progress=False)
    change = (ds.log_amplitude[1] - ds.log_amplitude[0]).values
    frequency = ds.frequency.values  # [pi rad/patch] of both axes
    np.testing.assert_allclose(change[:-1], 2 * np.log(np.cos(np.pi * frequency[:-1] / 2)), rtol=1e-4, atol=1e-4)
    assert frequency[-1] == 1 and ds.log_amplitude.values[1, -1] == pytest.approx(np.log(1e-6), abs=1e-3)


@pytest.mark.parametrize(("side", "channels"), [(8, 64), (64, 2)])
def test_box_blur_leaves_white_noise_a_quarter_of_its_variance(side, channels):
    """And more at the edges, where it averages fewer: exactly so by the covariance of what it gives."""
    x = torch.randn(40, channels, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ds = feature_variance(copied_then_blurred(channels), x, layers=["0", "1"], progress=False)
    blur = (np.eye(side) + np.eye(side, k=1)) / 2
    blur[-1, -1] = 1
    covariance = blur @ blur.T  # along one axis
    expected = (np.trace(covariance) ** 2 - covariance.sum() ** 2 / side**2) / (side**2 - 1)
    assert expected == pytest.approx(0.25, rel=2.2 / side)
    assert float(ds.variance[1] / ds.variance[0]) == pytest.approx(expected, rel=0.03)


def test_probes_see_a_box_blur_by_its_module():
    """It is a layer of its stage; the residual units, which it lies between, are those of the plain network."""
    x = torch.randn(4, 1, 8, 8)
    options = dict(image_size=8, channels=1, seed=0)
    plain, blurred = (create_model("resnet_nano", smoothing=kind, **options) for kind in ("none", "box"))
    ds = feature_variance(blurred, x, layers="stages.*.*", progress=False)
    blurs = [name for name, module in blurred.named_modules() if isinstance(module, Smoothing)]
    assert blurs == ["stages.0.3", "stages.1.3"] and set(blurs) < set(ds.layer_name.values)
    assert (ds.variance_change[np.isin(ds.layer_name, blurs)] < 0).all()
    units = [feature_variance(model, x, progress=False) for model in (plain, blurred)]
    assert units[0].layer_name.values.tolist() == units[1].layer_name.values.tolist()
    assert units[0].kind.values.tolist() == units[1].kind.values.tolist()


@pytest.mark.parametrize("name", ["resnet", "preact_resnet", "resnet_nano"])
def test_without_smoothing_nothing_of_a_network_changes(name):
    options = dict(image_size=8, channels=1, seed=3) | ({} if name == "resnet_nano" else dict(widths=(8,), blocks=(1,)))
    default, *others = (
        create_model(name, **options, **kind) for kind in ({}, {"smoothing": "none"}, {"smoothing": "box"})
    )
    assert not any(isinstance(module, Smoothing) for module in default.modules())
    state = default.state_dict()
    for other in others:
        assert list(other.state_dict()) == list(state)
        assert all(torch.equal(weight, state[key]) for key, weight in other.state_dict().items())


@pytest.mark.parametrize(
    ("smoothing", "options", "sides"),
    [
        ("blur", {}, [17, 10, 6]),  # 16 + 1; ceil(17 / 2) + 1; ceil(10 / 2) + 1
        ("tanh", {"bounded": True}, [17, 10, 6]),
        ("box", {"keeps_grid": True}, [16, 8, 4]),
    ],
)
@pytest.mark.parametrize("name", ["resnet", "preact_resnet"])
def test_smoothing_stands_before_every_subsampling(name, smoothing, options, sides):
    small = dict(widths=(8, 16, 16), blocks=(1, 2, 1), seed=0)
    model, plain = (create_model(name, smoothing=kind, **small).eval() for kind in (smoothing, "none"))
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 3, 16, 16)
    stages = [torch.nn.Sequential(*stage, Smoothing(**options)) for stage in plain.stages]
    found = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, __, out: found.append(out.shape[-1]))
    out = model(x)
    assert found == sides
    assert not torch.allclose(out, plain(x))
    plain.stages = torch.nn.Sequential(*stages)
    assert torch.equal(out, plain(x))


def test_post_activation_is_what_its_name_says():
    """What leaves a block is not negative; what leaves a pre-activation block is."""
    for name, negative in (("resnet", False), ("preact_resnet", True)):
        model = create_model(name, widths=(8, 16), blocks=(1, 1), seed=0)
        assert (model.stages(model.stem(torch.randn(2, 3, 8, 8))) < 0).any() == negative


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


def test_alternet50_of_imagenet_is_laid_out_as_published():
    with torch.device("meta"):
        model = create_model("alternet50_imagenet")
        out = model.eval()(torch.empty(2, 3, 224, 224))
    assert out.shape == (2, 10)
    kinds = {PreActivationBlock: "C", WindowAttentionBlock: "A"}
    layout = ["".join(kinds[type(block)] for block in stage) for stage in model.stages]
    assert layout == ["CCC", "CCCA", "CACACA", "CACA"]
    attentions = [block.attention for block in model.modules() if isinstance(block, WindowAttentionBlock)]
    assert {tuple(attention.position.table.shape) for attention in attentions} == {(1, 13, 13)}


def test_control_without_attention_is_the_same_network():
    with torch.device("meta"):
        control, bare = create_model("preact_resnet50_3464"), create_model("alternet50", attentions=(0, 0, 0, 0))
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (control, bare)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        (
            "alternet50",
            30,
            "window=4 does not divide maps of 15x15, 8x8, 4x4; use window=1 (possible: [1]). Images of 30x30 pixels"
            " gave them; sides that are multiples of 32 take window=4.",
        ),
        ("alternet50", (32, 96), None),
        ("alternet50", (32, 30), "maps of 16x15, 8x8, 4x4; use window=1"),
        ("alternet50", 24, "maps of 12x12, 6x6, 3x3; use window=3 (possible: [1, 3])"),
        ("alternet50", 1, "a map of 1x1; use window=1"),
        ("alternet50", 4, "maps of 2x2, 1x1; use window=1"),
        ("alternet50_imagenet", 32, "maps of 4x4, 2x2, 1x1; use window=1 (possible: [1]). Images of 32x32 pixels"),
        ("alternet50_imagenet", 448, None),
        ("alternet50_imagenet", 200, "maps of 25x25, 13x13, 7x7; use window=1"),
    ],
)
def test_windows_and_images(name, size, words):
    """A proposed window divides the maps of all stages with attention, and the image proposed takes the window."""

    def run(size, **options):
        with torch.device("meta"):
            height, width = size if isinstance(size, tuple) else (size, size)
            model = create_model(
                name, image_size=size, widths=(8, 16, 16, 16), blocks=(1, 2, 6, 4), heads=(1,) * 4, **options
            )
            model.eval()(torch.empty(1, 3, height, width))

    if words is None:
        run(size)
        return
    with pytest.raises(ValueError) as error:
        run(size)
    said = str(error.value)
    assert words in said
    run(size, window=int(said.partition("use window=")[2].partition(" ")[0]))
    step = int(said.partition("multiples of ")[2].partition(" ")[0])
    run((step, 2 * step))


def test_window_that_does_not_divide_names_those_that_do():
    block = WindowAttentionBlock(8, inner=4, heads=2, head_dim=4, window=5)
    with pytest.raises(
        ValueError, match=r"window=5 does not divide a map of 8x12; use window=4 \(possible: \[1, 2, 4]"
    ):
        block(torch.zeros(1, 8, 8, 12))
