import pytest
import torch
import torch.nn.functional as F

from vitprobe.models import create_model
from vitprobe.models.layers import PositionCode, sincos_positions

MODELS = ("simple_vit", "model_1", "model_2", "model_3")
SETTINGS = dict(image_size=(8, 12), patch_size=2, dim=24, depth=2, heads=3, mlp_ratio=1.5, num_classes=5, seed=0)


def build(name, **options):
    """A network of 4x6 patches, in double precision, whose parameters are nothing special."""
    model = create_model(name, **SETTINGS | options).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, torch.randn(3, 3, 8, 12, generator=generator, dtype=torch.float64)


def norm(x, layer):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight + layer.bias


def by_the_paper(model, images, *, code, alpha=(1.0, 1.0), input_alpha=1.0, scale=8**-0.5, use_value=True):
    """The network step by step; a block's alpha is `None` for Model III."""
    x = F.unfold(images, 2, stride=2).mT
    x = norm(
        norm(x, model.patches.pixel_norm) @ model.patches.project.weight.T + model.patches.project.bias,
        model.patches.norm,
    )
    x = input_alpha * x + (1 - input_alpha) * code
    for block, share in zip(model.blocks, alpha, strict=True):
        attention, normed, mixed = block.attention, norm(x, block.attention_norm), []
        weight = attention.query_key.weight.view(2, 3, 8, -1)
        for h in range(3):
            if share is None:
                query, key = weight[0, h].T, weight[1, h].T
            else:
                z = share * normed + (1 - share) * code
                query, key = z @ weight[0, h].T, z @ weight[1, h].T
            part = slice(8 * h, 8 * h + 8)
            value = normed @ attention.value.weight[part].T if use_value else normed[..., part]
            mixed.append((scale * query @ key.mT).softmax(-1) @ value)
        x = x + torch.cat(mixed, -1) @ attention.project.weight.T
        hidden = F.gelu(norm(x, block.mlp_norm) @ block.mlp[0].weight.T + block.mlp[0].bias)
        x = x + hidden @ block.mlp[2].weight.T + block.mlp[2].bias
    return norm(x, model.norm).mean(1) @ model.head.weight.T + model.head.bias


CODES = {"sincos": sincos_positions((4, 6), 24).double(), "identity": torch.eye(24, dtype=torch.float64)}


@pytest.mark.parametrize("position", CODES)
@pytest.mark.parametrize("use_value", [True, False])
def test_networks_step_by_step(position, use_value):
    code, options = CODES[position], dict(position=position, use_value=use_value)
    model, x = build("simple_vit", **options)
    expected = by_the_paper(model, x, code=code, input_alpha=0.5, use_value=use_value)
    torch.testing.assert_close(model(x), expected)
    model, x = build("model_1", alpha=[0.1, 0.6], **options)
    torch.testing.assert_close(model(x), by_the_paper(model, x, code=code, alpha=(0.1, 0.6), use_value=use_value))
    model, x = build("model_2", **options)
    torch.testing.assert_close(model(x), by_the_paper(model, x, code=code, alpha=(0, 0), use_value=use_value))


@pytest.mark.parametrize("scale", [None, 0.1])
def test_model_3_step_by_step(scale):
    model, x = build("model_3", scale=scale)
    expected = by_the_paper(model, x, code=0.0, alpha=(None, None), scale=scale or 8**-0.5)
    torch.testing.assert_close(model(x), expected)
    assert model.blocks[0].attention.query_key.weight.shape == (2 * 3 * 8, 24)


def test_learned_code_is_one_for_all_blocks():
    model, x = build("model_1", position="learned", alpha=0.3)
    codes = [parameter for name, parameter in model.named_parameters() if name.endswith("code")]
    assert len(codes) == 1 and codes[0].shape == (24, 24)
    torch.testing.assert_close(model(x), by_the_paper(model, x, code=codes[0], alpha=(0.3, 0.3)))
    for name, value in model.state_dict().items():
        if name.endswith("code"):
            assert torch.equal(value, codes[0])


def test_learned_code_starts_as_wide_as_the_sine_cosine_code():
    learned, fixed = (PositionCode(kind, (16, 16), 512)() for kind in ("learned", "sincos"))
    assert learned.square().mean().sqrt().item() == pytest.approx(fixed.square().mean().sqrt().item(), rel=0.02)
    assert fixed.square().mean().item() == pytest.approx(0.5, abs=1e-6)


def test_without_a_code_simple_vit_and_model_1_are_one():
    model, x = build("simple_vit", position="none")
    other, _ = build("model_1", position="none", alpha=0.2)
    assert torch.equal(model(x), other(x))
    torch.testing.assert_close(model(x), by_the_paper(model, x, code=0.0))


@pytest.mark.parametrize("name", MODELS)
def test_which_networks_know_where_a_patch_is(name):
    """Shuffled patches leave the pooled logits alone only where no code or free matrix tells places apart."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(24, generator=generator)

    def change(model, x):
        patches = F.unfold(x, 2, stride=2)
        return (model(F.fold(patches[..., order], (8, 12), 2, stride=2)) - model(x)).abs().max().item()

    assert change(*build(name)) > 1e-3
    if name in ("simple_vit", "model_1"):
        assert change(*build(name, position="none")) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_transposed_network_sees_the_transposed_image(name):
    """Any confusion of rows and columns shows on an image that is not square."""
    # A sine-cosine code has an x and a y: the transposed network's would be another one.
    position = "none" if name == "model_3" else "learned"
    model, x = build(name, position=position)
    other, _ = build(name, position=position, image_size=(12, 8))

    def transposed(value, axis, *sizes):
        first = axis % value.ndim + len(sizes) - 2
        return value.unflatten(axis, sizes).transpose(first, first + 1).flatten(axis % value.ndim, first + 1)

    state = model.state_dict()
    for key, value in state.items():
        if key.startswith("patches.pixel_norm") or key == "patches.project.weight":
            state[key] = transposed(value, -1, 3, 2, 2)
        elif key.endswith("code"):
            state[key] = transposed(value, 0, 4, 6)
        elif name == "model_3" and "query_key" in key:
            state[key] = transposed(value, 1, 4, 6)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x.mT), model(x))


@pytest.mark.parametrize(
    ("name", "same"), [("simple_vit", False), ("model_1", False), ("model_2", True), ("model_3", True)]
)
def test_which_maps_depend_on_the_image(name, same):
    model, x = build(name)
    inputs = []
    attention = model.blocks[1].attention
    attention.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    model(x)
    weights = attention.weights(inputs[0])
    assert torch.equal(weights[0], weights[1]) is same


def test_settings_of_the_paper():
    """Patch 2, 512 wide, 6 deep, 8 heads of 64, MLP of 512: counted by hand for CIFAR-10."""
    tokens, dim = 256, 512
    block = 4 * dim**2 + 2 * (dim**2 + dim) + 4 * dim
    embedding = 2 * 12 + (12 + 1) * dim + 2 * dim
    head = 2 * dim + 10 * (dim + 1)
    change = {"simple_vit": 0, "model_1": 0, "model_2": 0, "model_3": 6 * 2 * dim * (tokens - dim)}
    for name in MODELS:
        with torch.device("meta"):
            model = create_model(name)
        assert sum(p.numel() for p in model.parameters()) == embedding + 6 * block + head + change[name]
        attention = model.blocks[0].attention
        assert attention.heads == 8 and attention.scale == 64**-0.5
        assert not model.num_prefix_tokens


@pytest.mark.parametrize("name", MODELS)
def test_frozen_queries_and_keys(name):
    model = create_model(name, **SETTINGS | dict(train_query_key=False))
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"blocks.{i}.attention.query_key.weight" for i in range(2)}
    before = model.blocks[0].attention.query_key.weight.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(5, 3, 8, 12)).logsumexp(1).sum().backward()
    optimizer.step()
    assert torch.equal(model.blocks[0].attention.query_key.weight, before)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("model_1", dict(alpha=[0.1, 0.2, 0.3]), "has 3 entries for 2 blocks: give 2, or one number"),
        ("model_1", dict(alpha=1.5), "the share of the tokens beside the position code, 0 to 1"),
        ("simple_vit", dict(alpha=[0.1, 0.2]), "mixed in once: give one alpha"),
        ("model_2", dict(position="none"), "use position='sincos', 'identity' or 'learned', or maps='free'"),
        ("model_3", dict(position="sincos"), "no position code: use position='none', not 'sincos'"),
        ("model_2", dict(position="identity", dim=12), "use dim=24 or more, not 12, or larger patches"),
        ("model_2", dict(position="sinecos"), "unknown position 'sinecos'. Did you mean 'sincos'"),
        ("simple_vit", dict(maps="tokns"), "unknown maps 'tokns'. Did you mean 'tokens'"),
        ("simple_vit", dict(patch_size=3), "patch_size=3 does not divide an image of 8x12 pixels; use patch_size=2"),
        ("simple_vit", dict(heads=5), "heads=5 does not divide dim=24; use heads=4"),
        ("simple_vit", dict(dim=26, heads=2), "multiple of 4 and at least 8, not 26"),
    ],
)
def test_wrong_settings_name_the_right_ones(name, options, words):
    with pytest.raises(ValueError) as error:
        create_model(name, **SETTINGS | options)
    assert words in str(error.value)


def test_wrong_image_size_at_forward():
    with pytest.raises(
        ValueError, match=r"built for images of 8x12 pixels and got 8x8: build it with image_size=\(8, 8\)"
    ):
        create_model("simple_vit", **SETTINGS)(torch.zeros(1, 3, 8, 8))


def test_compiles_without_a_graph_break():
    torch.compiler.reset()
    model = create_model("model_1", **SETTINGS | dict(depth=2, alpha=[0.3, 0.0])).eval().requires_grad_(False)
    x = torch.randn(3, 3, 8, 12)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
