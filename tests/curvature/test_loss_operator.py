"""Curvature products against dense truth in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitprobe.curvature import LossOperator, LossStack
from vitprobe.models import create_model

NETS = {
    "vit": dict(patch_size=4, dim=8, depth=1, heads=2, mlp_ratio=1.0),
    "convit": dict(patch_size=4, dim=8, depth=2, heads=4, mlp_ratio=1.0, gpsa_layers=1, pool="mean"),
    "convmixer": dict(patch_size=4, dim=6, depth=1, kernel_size=3),
    "preact_resnet": dict(widths=(3, 4), blocks=(1, 1)),
}


def network(name: str) -> nn.Module:
    return create_model(name, image_size=8, channels=1, num_classes=3, seed=0, **NETS[name]).double()


def batch(images: int = 6, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (images,), generator=generator)


def operator(model: nn.Module, batches, **options) -> LossOperator:
    return LossOperator(model, batches, forward=lambda m, b: (m(b[0]), b[1]), images=lambda b: len(b[1]), **options)


def dense(model: nn.Module, x, y, loss=F.cross_entropy) -> torch.Tensor:
    """The Hessian by torch.func, which shares nothing with the operator but the model."""
    model = model.eval()
    named = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in named.values()]

    def value(flat):
        parts = [part.view_as(p) for part, p in zip(flat.split(sizes), named.values(), strict=True)]
        return loss(torch.func.functional_call(model, dict(zip(named, parts, strict=True)), (x,)), y)

    flat = torch.cat([p.reshape(-1) for p in named.values()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.func.jacrev(torch.func.grad(value), chunk_size=64)(flat)


@pytest.mark.parametrize("name", NETS)
def test_products_equal_the_dense_hessian(name):
    model, (x, y) = network(name), batch()
    op = operator(model, [(x, y)])
    vectors = torch.randn(op.size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(op.product(vectors), dense(model, x, y) @ vectors, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(op.product(vectors[:, 0]), op.product(vectors)[:, 0])


def test_batches_together_are_their_union_whatever_their_sizes():
    model, (x, y) = network("vit"), batch(7)
    whole, parts = operator(model, [(x, y)]), operator(model, [(x[:5], y[:5]), (x[5:], y[5:])])
    v = whole.gradient()
    torch.testing.assert_close(parts.gradient(), v)
    torch.testing.assert_close(parts.product(v), whole.product(v))
    torch.testing.assert_close(parts.product(v, of="gauss_newton"), whole.product(v, of="gauss_newton"))
    assert parts.value() == pytest.approx(whole.value(), rel=1e-12)


def test_softmax_regression_in_closed_form():
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False)).double(), batch()
    op = operator(model, [(x, y)])
    p, inputs = model(x).softmax(1).detach(), x.flatten(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    truth = torch.einsum("ncd,ni,nj->cidj", inner, inputs, inputs).reshape(op.size, op.size) / len(x)
    identity = torch.eye(op.size, dtype=torch.float64)
    torch.testing.assert_close(op.product(identity), truth)
    # Linear in its parameters: the network itself has no curvature.
    torch.testing.assert_close(op.product(identity, of="gauss_newton"), truth)


def test_gauss_newton_against_the_jacobian():
    model, (x, y) = network("convmixer").eval(), batch()
    op = operator(model, [(x, y)])
    jacobian = torch.stack([
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(logit, op.parameters, retain_graph=True)])
        for logit in model(x).reshape(-1)
    ]).view(len(x), 3, op.size)
    p = model(x).softmax(1).detach()
    inner = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(x)
    truth = torch.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian)
    v = torch.randn(op.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(op.product(v, of="gauss_newton"), truth @ v)


def test_weight_decay_shifts_the_hessian_by_its_coefficient():
    model, data = network("vit"), [batch()]
    plain, decayed = operator(model, data), operator(model, data, weight_decay=0.05)
    v = plain.gradient()
    torch.testing.assert_close(decayed.product(v), plain.product(v) + 0.05 * v)
    torch.testing.assert_close(decayed.gradient(), v + 0.05 * plain.point())
    assert decayed.value() == pytest.approx(plain.value() + 0.025 * float(plain.point().square().sum()))


def test_the_sum_of_norms_as_decay():
    model, data = network("convmixer"), [batch()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)  # biases are zero at first
    plain, decayed = operator(model, data), operator(model, data, weight_decay=0.05, decay="sum_of_norms")
    sizes = [p.numel() for p in plain.parameters]

    def term(flat):
        return 0.05 * sum(part.norm() for part in flat.split(sizes))

    point = plain.point()
    vectors = torch.randn(plain.size, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert decayed.value() - plain.value() == pytest.approx(float(term(point)))
    torch.testing.assert_close(decayed.gradient() - plain.gradient(), torch.func.grad(term)(point))
    hessian = torch.func.hessian(term)(point)
    torch.testing.assert_close(decayed.product(vectors) - plain.product(vectors), hessian @ vectors)


def test_the_sum_of_norms_has_no_derivative_at_zero():
    with pytest.raises(ValueError, match=r"no derivative where a whole tensor is zero: .*head.bias"):
        operator(network("vit"), [batch()], weight_decay=0.05, decay="sum_of_norms")
    assert operator(network("vit"), [batch()], decay="sum_of_norms").size  # without a coefficient there is no term


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("decay", ["half_square", "sum_of_norms"])
def test_a_stack_of_batches_is_each_alone(name, decay):
    model, data = network(name), [batch(seed=seed) for seed in range(3)]
    options = dict(weight_decay=0.05, decay=decay, parameters="*weight")
    stack = LossStack(operator(model, data, **options))
    vectors = torch.randn(3, stack.operator.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    products = stack.product(vectors)
    for b, one in enumerate(data):
        alone = operator(model, [one], **options)
        assert float(stack.losses[b]) == pytest.approx(alone.value())
        torch.testing.assert_close(stack.gradients[b], alone.gradient())
        torch.testing.assert_close(products[b], alone.product(vectors[b]))


def test_what_cannot_be_stacked_says_so():
    with pytest.raises(ValueError, match="use stack=1, or drop_last"):
        LossStack(operator(network("vit"), [batch(4), batch(3)]))

    class Branching(nn.Linear):
        def forward(self, x):
            x = super().forward(x.flatten(1))
            return x if x.sum() > 0 else 2 * x

    with pytest.raises(ValueError, match="Branching cannot be vectorised: use stack=1"):
        LossStack(operator(Branching(64, 3).double(), [batch(), batch()]))
    (x, y) = batch()
    bad = torch.full_like(x, float("nan"))
    with pytest.raises(ValueError, match="loss of batch 1 is nan"):
        LossStack(operator(network("vit"), [(x, y), (bad, y)]))


class Odd(nn.Module):
    """Frozen, tied, unused and 0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 3)
        self.tied = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.tied.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        x = self.first(x.flatten(1)).tanh() * self.scale + self.frozen
        return self.again(self.tied(x).tanh())


def test_frozen_tied_unused_and_scalar_parameters():
    torch.manual_seed(0)
    model, (x, y) = Odd().double(), batch()
    op = operator(model, [(x, y)])
    assert "frozen" not in op.names and op.names.count("tied.weight") == 1
    hessian = op.product(torch.eye(op.size, dtype=torch.float64))
    start = sum(
        p.numel() for n, p in zip(op.names, op.parameters, strict=True) if op.names.index(n) < op.names.index("unused")
    )
    assert hessian[start : start + 5].abs().max() == 0

    # The truth by central differences of the gradient.
    def gradient_at(v):
        with torch.no_grad():
            for p, part in zip(op.parameters, op._split(v), strict=True):
                p.copy_(part)
        return operator(model, [(x, y)]).gradient()

    point, v = op.point(), torch.randn(op.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    numeric = (gradient_at(point + 1e-5 * v) - gradient_at(point - 1e-5 * v)) / 2e-5
    gradient_at(point)
    torch.testing.assert_close(hessian @ v, numeric, rtol=1e-6, atol=1e-8)


def test_parameters_by_pattern():
    model, (x, y) = network("vit"), batch()
    op = operator(model, [(x, y)], parameters="head.*")
    assert op.names == ["head.weight", "head.bias"]
    full = dense(model, x, y)
    torch.testing.assert_close(op.product(torch.eye(op.size, dtype=torch.float64)), full[-op.size :, -op.size :])
    with pytest.raises(ValueError, match=r"matches \['heads.\*'\]; the model has"):
        operator(model, [(x, y)], parameters="heads.*")


def test_the_model_is_handed_back_as_it_was():
    model, (x, y) = network("preact_resnet").train(), batch()
    model.head.bias.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    op = operator(model, [(x, y)])
    op.product(op.gradient())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not model.head.bias.requires_grad and model.head.weight.requires_grad
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert sum(p.grad is not None for p in model.parameters()) == 1


def test_double_precision_on_a_copy():
    model, (x, y) = network("vit").float(), batch()
    op = operator(model, [(x, y)], dtype=torch.float64)
    assert op.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32


def test_a_loss_that_is_not_finite_names_its_batch():
    model, (x, y) = network("vit"), batch()
    bad = x.clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="loss of batch 1 is nan"):
        operator(model, [(x, y), (bad, y)]).gradient()


def test_a_loss_per_image_is_refused():
    op = operator(network("vit"), [batch()], loss=lambda a, b: F.cross_entropy(a, b, reduction="none"))
    with pytest.raises(ValueError, match="mean over the batch"):
        op.gradient()


def test_a_model_that_draws_in_evaluation_mode_is_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x.flatten(1)), training=True)

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="draws random numbers in evaluation mode"):
        operator(Noisy(64, 3).double(), [batch()]).gradient()
    torch.nn.Linear(1, 1)  # draws, so that the state below is another unless it was put back
    torch.set_rng_state(state)
    with pytest.raises(ValueError, match="draws random numbers"):
        operator(Noisy(64, 3).double(), [batch()]).product(torch.ones(64 * 3 + 3, dtype=torch.float64))


def test_batch_norm_over_the_batch_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    with pytest.raises(ValueError, match="2 is a batch norm without running statistics"):
        operator(model, [batch()])
    model[2] = nn.BatchNorm1d(3).double()

    def forward(model, batch):
        return model.train()(batch[0]), batch[1]

    op = LossOperator(model, [batch()], forward=forward, images=lambda b: len(b[1]))
    with pytest.raises(ValueError, match="forward puts batch norm in training mode"):
        op.gradient()


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="before PyTorch 2.9")
def test_float32_is_whole_inside_and_put_back():
    seen, matmul, before = [], torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    model = network("vit")
    model.register_forward_hook(lambda *_: seen.append(matmul.fp32_precision))
    try:
        torch.set_float32_matmul_precision("high")
        operator(model, [batch()]).gradient()
        assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
        assert set(seen) == {"ieee"}
    finally:
        torch.set_float32_matmul_precision(before)
