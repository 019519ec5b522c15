"""What other tools for curvature get wrong is right here; where PyHessian is at fault, the test shows that it is.

Faults measured on PyHessian 0.1 and hessian-eigenthings 1.0.0a5; only PyHessian is installed with vitprobe.
"""

import copy
import importlib
from pathlib import Path

import numpy as np
import pyhessian_resnet20
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_dense import NOTHING, PerImage, Quadratic, mean_output, prescribed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitprobe as vp
from vitprobe.curvature import Lanczos, eigenpairs

SHARED = Path(__file__).parents[2].parent / "shared"
CHECKPOINT = SHARED / "checkpoints" / "pyhessian-resnet20b.pkl"
CIFAR10 = SHARED / "data" / "cifar10" / "full"

# The package has a class of its module's name.
pyhessian = importlib.import_module("pyhessian.hessian")
pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")

# Nearly opposite ends, as an untrained ViT of 4,452 parameters has them.
OPPOSITE = np.array([121.767, -120.661, 61.743, 48.537, *np.linspace(-40, 40, 400)])


def single(spectrum) -> Quadratic:
    """A model in single precision whose Hessian is the spectrum on a diagonal."""
    return prescribed(spectrum, diagonal=True).float()


def vit(seed: int = 0) -> nn.Module:
    options = dict(image_size=8, channels=1, num_classes=3, patch_size=4, dim=8, depth=1, heads=2, mlp_ratio=2.0)
    return vp.create_model("vit", seed=seed, **options)


def batch(images: int = 16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 1, 8, 8, generator=generator)
    return x, torch.randint(3, (images,), generator=generator)


def theirs(model: nn.Module, data, *, loss=F.cross_entropy, seed: int = 0, **options):
    """PyHessian's eigenvalues of a model as it is handed to it, which is changed."""
    torch.manual_seed(seed)
    with sdpa_kernel(SDPBackend.MATH):
        return np.array(pyhessian.hessian(model, loss, data=data, cuda=False).eigenvalues(**options)[0])


def ours(model: nn.Module, data, **options) -> np.ndarray:
    return vp.hessian_eigenvalues(model, [data], progress=False, **options).eigenvalue.values[0]


def test_more_steps_make_no_ghosts():
    """Lanczos without reorthogonalisation gave five copies of the first eigenvalue after 100 steps."""
    spectrum = np.concatenate([[200.0, 60.0, 30.0, 20.0, 15.0], np.linspace(-5, 5, 995)])
    diagonal = torch.from_numpy(spectrum)
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alphas, betas, before, vector, beta = [], [], torch.zeros_like(start), start / start.norm(), 0.0
    for _ in range(100):
        rest = diagonal * vector - beta * before
        alphas.append(float(rest @ vector))
        rest -= alphas[-1] * vector
        beta = float(rest.norm())
        betas.append(beta)
        before, vector = vector, rest / beta
    plain = np.linalg.eigvalsh(np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1))
    assert (np.abs(plain - 200.0) < 1e-6).sum() >= 5

    lanczos = Lanczos(start)
    for _ in range(100):
        lanczos.grow(diagonal * lanczos.direction)
    top = lanczos.ritz()[0][::-1]
    np.testing.assert_allclose(top[:5], spectrum[:5], rtol=1e-12)
    assert top[5] < 5.0
    found = eigenpairs(lambda v: diagonal * v, start, 6, tol=1e-8, max_products=300, which="LA")
    np.testing.assert_allclose(found.values, np.sort(spectrum)[::-1][:6], rtol=1e-10)


def test_the_last_small_batch_counts_for_its_images():
    """hessian-eigenthings takes the mean over batches, here (2 + 2 + 20) / 3; PyHessian does not."""
    images = torch.full((9, 1, 1, 2), 2.0)
    images[8] = 20.0
    parts = [(part, torch.zeros(len(part))) for part in images.split(4)]
    model = PerImage(2).float()
    ds = vp.hessian_eigenvalues(model, parts, k=2, per="dataset", loss=mean_output, progress=False)
    np.testing.assert_allclose(ds.eigenvalue.values[0], (8 * 2 + 20) / 9, rtol=1e-6)
    by_pyhessian = pyhessian.hessian(model, mean_output, dataloader=parts, cuda=False).eigenvalues()[0]
    np.testing.assert_allclose(by_pyhessian, (8 * 2 + 20) / 9, rtol=1e-4)


def test_mode_and_gradients_stay():
    data, models = batch(), [vit(), vit()]
    for model in models:
        model.train()
        model.head.eval()
        F.cross_entropy(model(data[0]), data[1]).backward()
        model.head.bias.grad = None
    kept, lost = models
    gradients = [p.grad for p in kept.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    ours(kept, data)
    for p, g, value in zip(kept.parameters(), gradients, values, strict=True):
        assert p.grad is g and (g is None or torch.equal(g, value))
    assert [name for name, module in kept.named_modules() if not module.training] == ["head"]

    theirs(lost, data)
    assert not any(module.training for module in lost.modules())
    changed = [
        p.grad is None or value is None or not torch.equal(p.grad, value)
        for p, value in zip(lost.parameters(), values, strict=True)
    ]
    assert all(changed)


def test_starts_do_not_hang_on_the_global_random_state():
    data = batch()
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(ours(vit(), data))
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(ours(vit(), data, seed=1), results[0])
    assert not np.array_equal(*(theirs(vit(), data, seed=seed, top_n=2) for seed in (0, 1)))


def test_nearly_opposite_ends_are_told_apart():
    """Power iteration goes back and forth between them and takes the standstill of its estimate for convergence."""
    model, wrong = single(OPPOSITE), []
    for seed in range(5):
        estimates = theirs(copy.deepcopy(model), NOTHING[0], loss=mean_output, seed=seed, top_n=4)
        wrong.append(np.abs(estimates - OPPOSITE[:4]).max() > 5)
    assert all(wrong)
    for which, truth in {
        "LM": [121.767, -120.661, 61.743, 48.537],
        "LA": [121.767, 61.743, 48.537, 40.0],
        "SA": [-120.661, -40.0],
    }.items():
        found = ours(model, NOTHING[0], loss=mean_output, k=len(truth), which=which, tol=1e-5, max_products=400)
        np.testing.assert_allclose(found, truth, rtol=1e-6)


def test_nearly_opposite_ends_of_a_vit():
    model, data = vit(seed=19), batch()
    truth = ours(model, data, dtype=torch.float64, tol=1e-9, k=3)
    np.testing.assert_allclose(truth[0], -truth[1], rtol=0.03)
    np.testing.assert_allclose(ours(model, data, k=3), truth, rtol=1e-4)
    for seed in range(2):
        error = np.abs(theirs(copy.deepcopy(model), data, seed=seed, top_n=3) / truth - 1)
        assert error.max() > 0.01  # ten times the tolerance at which it stopped


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.inner = vit()

    def forward(self, x):
        return self.inner(x)


def test_parameters_that_are_never_used():
    with pytest.raises(AssertionError, match=r"torch\.Tensor"):
        theirs(Unused(), batch())
    np.testing.assert_allclose(ours(Unused(), batch()), ours(vit(), batch()), rtol=1e-5)


def test_fused_attention():
    options = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3, in_chans=1)
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", **options)
    x, y = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(RuntimeError, match="not implemented"):
        pyhessian.hessian(copy.deepcopy(model), F.cross_entropy, data=(x, y), cuda=False).eigenvalues()
    assert np.isfinite(ours(model, (x, y))).all()


def test_autocast_around_the_call_changes_nothing():
    model, data = vit(), batch()
    plain = ours(model, data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(ours(model, data), plain)
        half = theirs(copy.deepcopy(model), data)
    assert abs(half[0] / theirs(copy.deepcopy(model), data)[0] - 1) > 1e-3


def test_few_products_are_said_to_be_few():
    """hessian-eigenthings stops after ten steps, with errors of tenths, and says nothing."""
    with pytest.warns(UserWarning, match="not converged"):
        ds = vp.hessian_eigenvalues(single(OPPOSITE), NOTHING, loss=mean_output, max_products=10, progress=False)
    assert not ds.converged.values.all()
    nearest = np.abs(OPPOSITE[:, None] - ds.eigenvalue.values[0]).min(0)
    assert (nearest <= ds.residual.values[0] * (1 + 1e-5)).all()


def test_density_and_a_negative_trace():
    spectrum = np.array([5.0, -9.0, -1.0, -2.0, 3.0, *np.linspace(-2, 2, 30)])
    model = prescribed(spectrum).float()
    computer = pyhessian.hessian(copy.deepcopy(model), mean_output, data=NOTHING[0], cuda=False)
    with pytest.raises(RuntimeError, match="eig"):
        computer.density(iter=3)
    # It holds the change against a negative number, which any change is above, and so stops at the second vector.
    assert len(computer.trace(maxIter=50, tol=1e-6)) == 2
    ds = vp.hessian_density(model, NOTHING, loss=mean_output, samples=50, steps=3, progress=False)
    assert abs(ds.attrs["trace_mean"] - spectrum.sum()) < 4 * ds.attrs["trace_se"]
    # A vector of signs has the trace of a diagonal without error.
    ds = vp.hessian_density(single(spectrum), NOTHING, loss=mean_output, samples=3, steps=35, progress=False)
    np.testing.assert_allclose(ds.trace, spectrum.sum(), rtol=1e-4)


@pytest.fixture(scope="module")
def resnet20():
    """PyHessian's own trained network and the first 64 test images of CIFAR-10."""
    if not CHECKPOINT.is_file() or not CIFAR10.is_dir():
        pytest.skip("needs the shared checkpoint of PyHessian and the shared copy of CIFAR-10")
    with Image.open(CIFAR10 / "test_batch.webp") as mosaic:
        strip = torch.from_numpy(np.asarray(mosaic.convert("RGB"))[:32].copy())
    images = strip.view(32, 100, 32, 3)[:, :64].permute(1, 3, 0, 2).double() / 255
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (pyhessian_resnet20.MEAN, pyhessian_resnet20.STD)
    )
    labels = torch.from_numpy(np.load(CIFAR10 / "index.npz")["test_labels"][:64])
    return pyhessian_resnet20.load(CHECKPOINT), ((images - mean) / std).float(), labels


def test_the_checkpoint_is_read_right(resnet20):
    model, x, y = resnet20
    assert sum(p.numel() for p in model.parameters()) == 272_474
    with torch.no_grad():
        assert (model(x).argmax(1) == y).float().mean() > 0.85


def test_pyhessians_own_network(resnet20):
    """Test images 16 to 31, against numbers that two others gave.

    `exact`: scipy's `eigsh` (tol 1e-10) on a double backward pass in float64. `converged`: PyHessian with
    `maxIter=1000, tol=1e-6`, five times the products; `defaults`: PyHessian as it comes.
    """
    exact = np.array([266.160658, 63.991757, 42.429399, 32.753049, 11.515148])
    converged = np.array([266.158844, 63.991436, 42.427887, 32.753117, 11.515038])
    defaults = np.array([265.977539, 63.914200, 42.380974, 32.759514, 11.504434])
    model, x, y = resnet20
    ds = vp.hessian_eigenvalues(model, [(x[16:32], y[16:32])], progress=False)
    found = ds.eigenvalue.values[0]
    np.testing.assert_allclose(found, exact, rtol=2e-5)
    np.testing.assert_allclose(found, converged, rtol=1e-4)
    assert np.abs(found / exact - 1).max() < 0.02 * np.abs(defaults / exact - 1).max()
    assert int(ds.products[0]) <= 30


def test_pyhessian_run_to_convergence_agrees(resnet20):
    model, x, y = resnet20
    data = x[4:8], y[4:8]
    estimates = theirs(copy.deepcopy(model), data, top_n=3, maxIter=500, tol=1e-6)
    np.testing.assert_allclose(ours(model, data, k=3, tol=1e-4), estimates, rtol=2e-4)
