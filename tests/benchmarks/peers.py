"""Ways to the eigenvalues of largest magnitude of a network's Hessian, each called as its makers mean it to be, and the
published way to a loss landscape.

A solver takes a network in evaluation mode, one batch and a meter that counts its products, and gives eigenvalues and
eigenvectors. None of the other packages belongs to vitprobe: curvature.py leaves out what is not installed.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.calling import untouched
from vitprobe.curvature import random_direction
from vitprobe.data import ImageData

Batch = tuple[Tensor, Tensor]
Pairs = tuple[np.ndarray, Tensor]  # values (rank,), vectors (rank, parameter)
TOP = 5
TOL = 1e-3  # relative residual asked of every solver that can be asked for one
SEED = 0


class SpentError(Exception):
    """A solver asked for more products than it was given."""


@dataclass
class Meter:
    """Counts Hessian-vector products, whoever computes them."""

    most: float = math.inf
    products: int = 0

    def add(self, count: int) -> None:
        if self.products + count > self.most:
            raise SpentError
        self.products += count

    def wrap(self, product: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.add(1)
            return product(*arguments, **options)

        return counted


@dataclass(frozen=True)
class Solver:
    """A name for the table, the package it needs, and the call.

    Attributes:
        name: with its settings.
        package: what must be importable.
        call: the solver.
        options: of the call.
        slow: run on the first batch only.
    """

    name: str
    package: str
    call: Callable[..., Pairs]
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False


class DoubleBackward:
    """Hessian-vector products in plain PyTorch: one graph of the gradient, kept, and a backward pass for each.

    Args:
        model: in evaluation mode.
        batch: images and labels.
        keep: whether the graph outlives a product.
    """

    def __init__(self, model: nn.Module, batch: Batch, *, keep: bool = True) -> None:
        self.keep = keep
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        loss = F.cross_entropy(model(batch[0]), batch[1])
        self.gradients = torch.autograd.grad(loss, self.parameters, create_graph=True)

    def product(self, vector: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(vector.split(self.sizes), self.parameters, strict=True)]
        images = torch.autograd.grad(self.gradients, self.parameters, parts, retain_graph=self.keep)
        return torch.cat([image.reshape(-1) for image in images])

    def start(self) -> Tensor:
        """Random numbers in the shape of the vectors."""
        draw = torch.randn(sum(self.sizes), generator=torch.Generator().manual_seed(SEED))
        return draw.to(self.parameters[0])


def eigsh(product: Callable[[np.ndarray], Any], size: int, dtype: Any, *, tol: float, **options: Any) -> Pairs:
    """SciPy's ARPACK on a product of NumPy vectors, from a random start."""
    from scipy.sparse.linalg import LinearOperator
    from scipy.sparse.linalg import eigsh as arpack

    operator = LinearOperator((size, size), matvec=product, dtype=dtype)
    start = np.random.default_rng(SEED).standard_normal(size).astype(dtype)
    values, vectors = arpack(operator, which="LM", tol=tol, v0=start, **({"k": TOP} | options))
    best = np.argsort(-np.abs(values))
    return values[best], torch.from_numpy(vectors.T[best])


def plain_eigsh(model: nn.Module, batch: Batch, meter: Meter, *, tol: float = TOL, **options: Any) -> Pairs:
    hessian = DoubleBackward(model, batch)
    like = hessian.parameters[0]

    def product(vector: np.ndarray) -> np.ndarray:
        meter.add(1)
        return hessian.product(torch.as_tensor(vector.reshape(-1)).to(like)).cpu().numpy()

    return eigsh(product, sum(hessian.sizes), str(like.dtype).removeprefix("torch."), tol=tol, **options)


def vitprobe(model: nn.Module, batch: Batch, meter: Meter) -> Pairs:
    """The probe as users call it; its eigenvectors, which it does not hand out, are picked up where they are made."""
    import vitprobe as vp
    from vitprobe.curvature import Eigenpairs, LossOperator

    found: list[Eigenpairs] = []
    remember, multiply = Eigenpairs.__init__, LossOperator.product

    def remembered(pairs: Any, *arguments: Any, **options: Any) -> None:
        remember(pairs, *arguments, **options)
        found.append(pairs)

    def counted(operator: Any, vectors: Tensor, *arguments: Any, **options: Any) -> Tensor:
        meter.add(1 if vectors.ndim == 1 else vectors.shape[1])
        return multiply(operator, vectors, *arguments, **options)

    with mock.patch.object(Eigenpairs, "__init__", remembered), mock.patch.object(LossOperator, "product", counted):
        ds = vp.hessian_eigenvalues(model, [batch], k=TOP, tol=TOL, progress=False)
    if meter.products != int(ds.products.sum()):
        raise RuntimeError(f"{meter.products} products were counted, vitprobe says {int(ds.products.sum())}")
    return ds.eigenvalue.values[0], found[-1].vectors


def pyhessian(model: nn.Module, batch: Batch, meter: Meter, **options: Any) -> Pairs:
    module = importlib.import_module("pyhessian.hessian")  # the package has a class of its module's name
    counted = meter.wrap(module.hessian_vector_product)
    with mock.patch.object(module, "hessian_vector_product", counted), torch.random.fork_rng():
        torch.manual_seed(SEED)
        on_gpu = batch[0].device.type == "cuda"
        computer = module.hessian(model, nn.CrossEntropyLoss(), data=batch, cuda=on_gpu)
        try:
            values, parts = computer.eigenvalues(top_n=TOP, **options)
        finally:
            model.zero_grad()  # its gradients hold their own graph, in a circle
    return np.array(values), torch.stack([torch.cat([part.reshape(-1) for part in vector]) for vector in parts])


def _eigenthings(model: nn.Module, batch: Batch, meter: Meter) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    operator = HessianOperator(model, [batch], supervised_loss(nn.CrossEntropyLoss()))
    operator.matvec = meter.wrap(operator.matvec)
    return operator


def eigenthings_lanczos(model: nn.Module, batch: Batch, meter: Meter, **options: Any) -> Pairs:
    from hessian_eigenthings import lanczos

    found = lanczos(_eigenthings(model, batch, meter), k=TOP, seed=SEED, **options)
    return found.eigenvalues.cpu().numpy(), found.eigenvectors


def eigenthings_power(model: nn.Module, batch: Batch, meter: Meter, **options: Any) -> Pairs:
    from hessian_eigenthings import deflated_power_iteration

    found = deflated_power_iteration(_eigenthings(model, batch, meter), k=TOP, seed=SEED, **options)
    return found.eigenvalues.cpu().numpy(), found.eigenvectors


def curvlinops(model: nn.Module, batch: Batch, meter: Meter, *, tol: float) -> Pairs:
    """Its operator in SciPy's eigsh, float32 throughout and without its two passes that check the data."""
    from curvlinops import HessianLinearOperator

    parameters = [p for p in model.parameters() if p.requires_grad]
    operator = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), parameters, [batch], check_deterministic=False, num_data=len(batch[0])
    ).to_scipy(dtype=np.float32)
    return eigsh(meter.wrap(operator.matvec), operator.shape[0], np.float32, tol=tol)


VITPROBE = Solver(f"vitprobe, tol {TOL:g}", "vitprobe", vitprobe)
PYHESSIAN = Solver("PyHessian, defaults", "pyhessian", pyhessian)
EIGSH = Solver(f"eigsh on double backward, tol {TOL:g}", "scipy", plain_eigsh)
SOLVERS = (
    VITPROBE,
    PYHESSIAN,
    Solver("hessian-eigenthings Lanczos, defaults", "hessian_eigenthings", eigenthings_lanczos),
    *(
        Solver(
            f"hessian-eigenthings Lanczos, {steps} steps",
            "hessian_eigenthings",
            eigenthings_lanczos,
            {"max_iter": steps},
            slow=steps > 50,
        )
        for steps in (30, 50, 100)
    ),
    Solver(
        f"hessian-eigenthings deflated power, tol {TOL:g}",
        "hessian_eigenthings",
        eigenthings_power,
        {"tol": TOL},
        slow=True,
    ),
    Solver("curvlinops + eigsh, tol 0.01", "curvlinops", curvlinops, {"tol": 1e-2}),
    Solver(f"curvlinops + eigsh, tol {TOL:g}", "curvlinops", curvlinops, {"tol": TOL}),
    EIGSH,
)
TIGHTER = tuple(
    Solver(f"PyHessian, tol {tol:g}, 2000 iterations", "pyhessian", pyhessian, {"tol": tol, "maxIter": 2000}, slow=True)
    for tol in (1e-5, 1e-6, 1e-7)
)


class Augmented(torch.utils.data.Dataset):
    """Images one by one, each augmented and normalised when it is asked for, by torchvision on tensors."""

    def __init__(self, data: ImageData, count: int) -> None:
        from torchvision import transforms

        self.images, self.labels = data.train.images[:count], data.train.labels[:count]
        self.transform = transforms.Compose([
            transforms.RandomCrop(data.image_size, padding=data.image_size[0] // 8),
            transforms.RandomHorizontalFlip(),
            transforms.ConvertImageDtype(torch.float32),
            transforms.Normalize(data.mean, data.std),
        ])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def published_landscape(model: nn.Module, data: ImageData, count: int, *, cells: int, batch_size: int) -> None:
    """For every cell, weights by `load_state_dict` and a pass of a loader that shuffles and augments anew.

    The loss is the logarithm of the softmax; the other numbers that the published code computes for every batch, and
    its mixup, are left out.
    """
    device = next(model.parameters()).device
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    a, b = (random_direction(weights, normalisation="paper", generator=generator) for _ in range(2))
    loader = torch.utils.data.DataLoader(Augmented(data, count), batch_size=batch_size, shuffle=True)
    with untouched(model):
        for y in np.linspace(-1, 1, cells):
            for x in np.linspace(-1, 1, cells):
                moved = {name: w + x * a[name] + y * b[name] for name, w in weights.items()}
                model.load_state_dict(moved, strict=False)
                for images, labels in loader:
                    F.nll_loss(model(images.to(device)).softmax(1).log(), labels.to(device)).item()
        model.load_state_dict(weights, strict=False)
