"""Curvature over two processes, against the dense Hessian of the union of their batches in float64."""

import functools
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from test_loss_operator import batch, dense, network, operator
from torch import nn
from two_ranks import results, run

from vitprobe.probes import hessian_density, hessian_eigenvalues
from vitprobe.ranks import Ranks
from vitprobe.seeds import derive_seed

SIZES = (4, 4, 4, 4, 4, 4, 3)  # images in a batch
SHARES = {"unequal": (5, 2), "one has none": (0, 7), "the other has a single one": (6, 1)}
DECAY = 0.1
K, TOL = 3, 1e-8


def batches():
    return list(zip(*(part.split(4) for part in batch(sum(SIZES))), strict=True))


def share(rank, shares="unequal"):
    first, _ = SHARES[shares]
    return batches()[:first] if rank == 0 else batches()[first:]


@functools.cache
def truth():
    """The Hessian of the mean loss over all images, without decay."""
    return dense(network("convmixer"), *batch(sum(SIZES)))


def of_operator(rank, shares):
    op = operator(network("convmixer"), share(rank, shares), weight_decay=DECAY, group=dist.group.WORLD)
    first = op.value()
    gradient = op.gradient()
    several = op.product(torch.cat([gradient[:, None], torch.ones(op.size, 1).double()], 1))
    return {
        "value": [first, op.value()],
        "gradient": gradient,
        "several": several,
        "one": op.product(gradient),
        "gauss_newton": op.product(gradient, of="gauss_newton"),
        "images": (op.images, op.total),
    }


def eigenvalues(rank, shares, **options):
    model, data = network("convmixer"), share(rank, shares)
    options = dict(k=K, tol=TOL, group=dist.group.WORLD, progress=False) | options
    return hessian_eigenvalues(model, data, **options)


def parallel(rank):
    """A wrapped model, whose hooks would average gradients over the ranks."""
    bare = network("convmixer")
    model = nn.parallel.DistributedDataParallel(bare)
    flags = [p.requires_grad for p in bare.parameters()]
    ds = hessian_eigenvalues(model, share(rank), k=K, tol=TOL, per="dataset", group=dist.group.WORLD, progress=False)
    assert model.training and [p.requires_grad for p in bare.parameters()] == flags
    assert all(p.grad is None for p in bare.parameters())
    return ds


def fails_in_a_product(rank):
    """The second rank's loss is no number any more when all are in the second product."""
    calls = []

    def loss(logits, targets):
        calls.append(1)
        # Three in the gradient, one more of them to see that it repeats; two in a product.
        return nn.functional.cross_entropy(logits, targets) * (float("nan") if rank and len(calls) > 5 else 1)

    op = operator(network("convmixer"), share(rank), loss=loss, group=dist.group.WORLD)
    gradient = op.gradient()
    return [op.product(gradient) for _ in range(3)]


def other_weights(rank):
    model = network("convmixer")
    with torch.no_grad():
        model.head.bias += rank
    return hessian_density(model, share(rank), group=dist.group.WORLD, progress=False)


def in_single(rank):
    """Sums of several ranks in single precision are the same bits everywhere."""
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(rank))
    return Ranks(dist.group.WORLD).sum(x)


def runs_out_of_memory(rank):
    def loss(logits, targets):
        raise MemoryError("nothing left")

    op = operator(network("convmixer"), share(rank), group=dist.group.WORLD, **({"loss": loss} if rank else {}))
    return op.gradient()


def reach(rank):
    """Over which device a group takes the tensors of a model."""
    ways = {}
    for backends in ("cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo"):
        with mock.patch.object(dist, "get_backend_config", return_value=backends):
            for device in ("cpu", "cuda", "mps"):
                try:
                    ways[backends, device] = Ranks(dist.group.WORLD, device)._carrier.type
                except ValueError as error:
                    ways[backends, device] = str(error)
    return ways


class Described(list):
    def __init__(self, rank):
        super().__init__(share(rank))
        self.description = {"dataset": "noise", "share": rank}


CASES = {
    **{f"operator, {shares}": functools.partial(of_operator, shares=shares) for shares in SHARES},
    **{
        f"dataset, {shares}": functools.partial(eigenvalues, shares=shares, per="dataset")
        for shares in list(SHARES)[:2]
    },
    **{f"batch, {shares}": functools.partial(eigenvalues, shares=shares) for shares in list(SHARES)[:2]},
    "stacked": functools.partial(eigenvalues, shares="unequal", stack=3),
    "no group": functools.partial(eigenvalues, shares="unequal", per="dataset", group=None),
    "density": lambda rank: hessian_density(
        network("convmixer"), Described(rank), samples=2, steps=10, group=dist.group.WORLD, progress=False
    ),
    "parallel": parallel,
    "in single": in_single,
    "with a path": lambda rank: eigenvalues(rank, "unequal", path="spectrum.nc"),
    "empty": lambda rank: hessian_eigenvalues(network("convmixer"), [], group=dist.group.WORLD, progress=False),
    "all empty": lambda rank: hessian_density(network("convmixer"), [], group=dist.group.WORLD, progress=False),
    "no labels": lambda rank: hessian_density(
        network("convmixer"),
        [b[0] for b in share(rank)] if rank else share(rank),
        group=dist.group.WORLD,
        progress=False,
    ),
    "not finite": fails_in_a_product,
    "other weights": other_weights,
    "out of memory": runs_out_of_memory,
    "reach": reach,
    "after all errors": functools.partial(of_operator, shares="unequal"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(__file__, tmp_path_factory)


def given(case):
    """What a case gave, or its error once more."""
    if isinstance(case, Exception):
        raise case
    return case


@pytest.mark.parametrize("case", [*(f"operator, {shares}" for shares in SHARES), "after all errors"])
def test_products_are_those_of_the_union(found, case):
    alone, h = operator(network("convmixer"), batches(), weight_decay=DECAY), truth()
    h = h + DECAY * torch.eye(len(h))
    for mine in (given(one[case]) for one in found):
        gradient = mine["gradient"]
        torch.testing.assert_close(gradient, alone.gradient(), rtol=1e-9, atol=1e-12)
        assert mine["value"] == pytest.approx([alone.value()] * 2, rel=1e-12)
        torch.testing.assert_close(mine["one"], h @ gradient, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mine["several"], h @ torch.stack([gradient, torch.ones(len(h))], 1).double())
        expected = alone.product(gradient, of="gauss_newton")
        torch.testing.assert_close(mine["gauss_newton"], expected, rtol=1e-9, atol=1e-9)
        assert mine["images"][1] == sum(SIZES)
    if case != "after all errors":
        first = SHARES[case.partition(", ")[2]][0]
        assert [one[case]["images"][0] for one in found] == [list(SIZES[:first]), list(SIZES[first:])]


def test_ranks_have_the_same_bits(found):
    torch.testing.assert_close(*(one["in single"] for one in found), rtol=0, atol=0)
    for name in ("gradient", "one", "several"):
        torch.testing.assert_close(*(one["operator, unequal"][name] for one in found), rtol=0, atol=0)
    for name, ds in found[0].items():
        if isinstance(ds, xr.Dataset) and name != "no group":
            xr.testing.assert_identical(ds, found[1][name])


@functools.cache
def in_one_process():
    return hessian_eigenvalues(network("convmixer"), batches(), k=K, tol=TOL, progress=False)


def largest(h):
    values = torch.linalg.eigvalsh(h).numpy()
    return values[np.argsort(-np.abs(values))][:K]


@pytest.mark.parametrize("case", ["dataset, unequal", "dataset, one has none", "parallel"])
def test_eigenvalues_of_all_batches_together(found, case):
    for ds in (given(one[case]) for one in found):
        np.testing.assert_allclose(ds.eigenvalue[0], largest(truth()), rtol=1e-8)
        assert ds.converged.all() and ds.images.item() == sum(SIZES) and ds.ranks == 2


@pytest.mark.parametrize("case", ["batch, unequal", "batch, one has none", "stacked"])
def test_eigenvalues_of_each_batch_rank_after_rank(found, case):
    expected = in_one_process()
    for ds in (given(one[case]) for one in found):
        assert ds.images.values.tolist() == list(SIZES) and ds.ranks == 2
        assert ds.fingerprint.values.tolist() == expected.fingerprint.values.tolist()
        np.testing.assert_allclose(ds.eigenvalue, expected.eigenvalue, rtol=1e-8)
        np.testing.assert_allclose(ds.loss, expected.loss, rtol=1e-12)
        assert ds.nep == expected.nep and ds.ape == pytest.approx(expected.ape, rel=1e-8)


@pytest.mark.parametrize("b", [0, 5, 6])
def test_each_batch_is_dense_truth(found, b):
    """Of the first rank's first, and of those of the second."""
    expected = largest(dense(network("convmixer"), *batches()[b]))
    for one in found:
        np.testing.assert_allclose(given(one["batch, unequal"]).eigenvalue[b], expected, rtol=1e-8)


def test_without_a_group_each_has_its_own_numbers(found):
    for rank, one in enumerate(found):
        x, y = (torch.cat(parts) for parts in zip(*share(rank), strict=True))
        ds = given(one["no group"])
        np.testing.assert_allclose(ds.eigenvalue[0], largest(dense(network("convmixer"), x, y)), rtol=1e-8)
        assert ds.images.item() == len(x) and "ranks" not in ds.attrs


def test_density_of_all_batches(found):
    h = truth()
    expected = hessian_density(network("convmixer"), batches(), samples=2, steps=10, progress=False)
    for ds in (given(one["density"]) for one in found):
        for name in ("node", "weight", "trace"):
            np.testing.assert_allclose(ds[name], expected[name], rtol=1e-6, atol=1e-9)
        assert ds.attrs["images"] == sum(SIZES) and ds.ranks == 2
        assert ds.dataset == "noise" and "share" not in ds.attrs
        for sample in range(2):  # the first moment is exact, whatever the number of steps
            generator = torch.Generator().manual_seed(derive_seed(0, "density", sample))
            signs = (torch.randint(0, 2, (len(h),), generator=generator) * 2 - 1).double()
            assert ds.trace[sample].item() == pytest.approx((signs @ h @ signs).item(), rel=1e-8)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("with a path", "the file of one process"),
        ("empty", "the batches were empty"),
        ("all empty", "the batches were empty"),
        ("no labels", "the batch has no targets"),
        ("not finite", "the loss of batch . is nan"),
        ("other weights", "models that differ in head.bias: "),
    ],
)
def test_errors_are_those_of_all_ranks(found, case, message):
    for one in found:
        with pytest.raises(ValueError, match=message):
            raise one[case]
    if case in ("no labels", "not finite"):
        assert str(found[0][case]) == f"rank 1: {found[1][case]}"


def test_another_kind_of_error(found):
    first, second = (one["out of memory"] for one in found)
    assert isinstance(second, MemoryError)
    assert type(first) is RuntimeError and str(first) == "rank 1: MemoryError: nothing left"


def test_tensors_travel_where_the_group_reaches(found):
    for one in found:
        ways = given(one["reach"])
        for device, way in (("cpu", "cpu"), ("cuda", "cuda"), ("mps", "cpu")):
            assert ways["cpu:gloo,cuda:nccl", device] == way
            assert ways["cpu:gloo", device] == "cpu"
        assert ways["cuda:nccl", "cuda"] == "cuda"
        assert "reaches ['cuda'] only" in ways["cuda:nccl", "cpu"]


if __name__ == "__main__":
    warnings.simplefilter("error")
    run(CASES)
