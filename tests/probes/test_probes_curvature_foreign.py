"""Curvature and landscapes of other libraries' transformers, against finite differences of their gradients."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import vitprobe as vp
from vitprobe.results import check

CLASSES = 4
HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def timm_vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    options = dict(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, drop_rate=0.1, drop_path_rate=0.1)
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **options)


def torchvision_swin() -> nn.Module:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    # Two stages, the second block of each with shifted windows; 8x8 patches in windows of 4x4.
    options = dict(patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4])
    return swin.SwinTransformer(num_classes=CLASSES, **options)


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        **dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24),
        **dict(image_size=32, patch_size=16, num_labels=CLASSES),
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm ViT": timm_vit,
    "torchvision Swin": torchvision_swin,
    "transformers ViT": transformers_vit,
}


def batch_of(model: nn.Module):
    """Six images and labels in the form that the model takes."""
    x = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    return {"pixel_values": x, "labels": y} if hasattr(model, "config") else (x, y)


@pytest.fixture(scope="module", params=MODELS)
def foreign(request):
    """A model as a user leaves it after training, larger weights than at the start, and a batch for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[request.param]()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.15 * torch.randn_like(p))
        batch = batch_of(model)
        loss_of(model.train(), batch).backward()  # gradients and modes of the user's
    next(model.parameters()).requires_grad_(False)
    list(model.modules())[-1].eval()
    model.register_forward_hook(lambda module, args, output: None)
    return model, batch


def loss_of(model: nn.Module, batch) -> Tensor:
    if isinstance(batch, dict):
        return F.cross_entropy(model(batch["pixel_values"].to(next(model.parameters()))).logits, batch["labels"])
    return F.cross_entropy(model(batch[0].to(next(model.parameters()))), batch[1])


def by_differences(model: nn.Module, batch, k: int) -> np.ndarray:
    """Eigenvalues of largest magnitude from gradients alone: scipy on central differences, in float64."""
    model = copy.deepcopy(model).double().eval()
    variables = [p for p in model.parameters() if p.requires_grad]
    point, step = parameters_to_vector(variables).detach(), 1e-6

    def gradient(at: Tensor) -> Tensor:
        vector_to_parameters(at, variables)
        return parameters_to_vector(torch.autograd.grad(loss_of(model, batch), variables))

    def product(v: np.ndarray) -> np.ndarray:
        shift = step * torch.from_numpy(v.ravel() / np.linalg.norm(v))
        slope = (gradient(point + shift) - gradient(point - shift)) / (2 * step)
        return slope.numpy() * np.linalg.norm(v)

    start = np.random.default_rng(0).normal(size=len(point))
    operator = LinearOperator((len(point), len(point)), product, dtype=float)
    values = eigsh(operator, k, which="LM", tol=1e-5, v0=start, return_eigenvectors=False)
    return values[np.argsort(-np.abs(values))]


def state(model: nn.Module) -> dict:
    """Everything of a model and of the process that a probe could leave behind."""
    return {
        "numbers": [x.clone() for x in model.state_dict().values()],
        "identity": [id(p) for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "gradient identity": [id(p.grad) for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [dict(getattr(module, name) or {}) for module in model.modules() for name in HOOKS],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": [torch.get_rng_state()],
        "gradients on": [torch.is_grad_enabled()],
        "attention": [getattr(getattr(model, "config", None), "_attn_implementation", None)],
    }


def assert_same(before: dict, after: dict) -> None:
    for key, values in before.items():
        for a, b in zip(values, after[key], strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, key


def test_eigenvalues_by_one_call(foreign):
    model, batch = foreign
    before = state(model)
    ds = vp.hessian_eigenvalues(model, [batch], k=2, progress=False)
    assert_same(before, state(model))
    check(ds)
    truth = by_differences(model, batch, 2)
    assert ds.converged.values.all()
    error = np.abs(ds.eigenvalue.values[0] - truth)
    assert (error <= ds.residual.values[0] + 1e-4 * np.abs(truth)).all()
    exact = vp.hessian_eigenvalues(model, [batch], k=2, dtype=torch.float64, tol=1e-7, progress=False)
    np.testing.assert_allclose(exact.eigenvalue.values[0], truth, rtol=1e-6)
    assert_same(before, state(model))


def test_landscape_by_one_call(foreign):
    """Every cell is the model at weights that the call was made at; these lie on a plane through the model's own."""
    model, batch = foreign
    before = state(model)
    ds = vp.loss_landscape(model, [batch], points=3, span=0.5, seed=1, progress=False)
    assert_same(before, state(model))
    check(ds)
    seen: list[Tensor] = []

    def spy(one: nn.Module, images) -> Tensor:
        seen.append(torch.cat([p.detach().reshape(-1) for p in one.parameters()]).clone())
        return one(images["pixel_values"]).logits if isinstance(images, dict) else one(images[0])

    again = vp.loss_landscape(model, [batch], points=3, span=0.5, seed=1, forward=spy, progress=False)
    np.testing.assert_array_equal(ds.nll, again.nll)
    points = torch.stack(seen).double().view(3, 3, -1)  # y, x
    centre = parameters_to_vector(model.parameters()).detach().double()
    torch.testing.assert_close(points[1, 1], centre, rtol=0, atol=0)
    a, b = points[1, 2] - centre, points[2, 1] - centre
    assert float(a.norm()) > 0.1 and float(b.norm()) > 0.1
    copied = copy.deepcopy(model).eval()
    for j, y in enumerate((-1, 0, 1)):
        for i, x in enumerate((-1, 0, 1)):
            torch.testing.assert_close(points[j, i], centre + x * a + y * b, rtol=0, atol=1e-6)
            vector_to_parameters(points[j, i].float(), copied.parameters())
            with torch.no_grad():
                nll = float(loss_of(copied, batch))
            cell = ds.isel(direction_pair=0, y=j, x=i)
            assert float(cell.nll) == pytest.approx(nll, rel=1e-5)
            assert float(cell.l2_half_square) == pytest.approx(0.5 * float(points[j, i].square().sum()), rel=1e-5)
    assert float(ds.nll.std()) > 0.01


@pytest.mark.parametrize("wrap", ["data parallel", "compiled", "compiled in place"])
def test_wrapped_models_give_the_numbers_of_the_bare_one(foreign, wrap):
    model, batch = foreign
    if wrap == "data parallel":
        wrapped: nn.Module = nn.DataParallel(model)
    elif wrap == "compiled":
        wrapped = torch.compile(model, backend="aot_eager")
    else:
        wrapped = copy.deepcopy(model)
        wrapped.compile(backend="aot_eager")  # like every backend but "eager", without a second derivative
    before = state(model)
    bare, other = (vp.hessian_eigenvalues(one, [batch], k=2, progress=False) for one in (model, wrapped))
    np.testing.assert_array_equal(bare.eigenvalue, other.eigenvalue)
    assert bare.attrs["model_class"] == other.attrs["model_class"]
    bare, other = (vp.loss_landscape(one, [batch], points=2, progress=False) for one in (model, wrapped))
    np.testing.assert_array_equal(bare.nll, other.nll)
    assert_same(before, state(model))
