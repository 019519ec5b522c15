"""Feature probes over two processes, against one that has all batches; and what is merged, against all data."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from two_ranks import results, run

from vitprobe.attach import plan
from vitprobe.models import create_model
from vitprobe.probes import (
    CKA,
    FEATURE_PROBES,
    AttentionMaps,
    Calibration,
    FeatureProbe,
    FeatureVariance,
    Fourier,
    Nonlocality,
    RunningMean,
    SpatialOperators,
    UnitMean,
    cka,
    fourier,
    probe,
)
from vitprobe.probes.attention import SiteMean
from vitprobe.probes.base import RunningCovariance
from vitprobe.probes.cka import GROUPS, _Sums
from vitprobe.probes.cka import _Groups as Batches
from vitprobe.probes.spatial import _Groups as Maps
from vitprobe.ranks import agreed, merged

SIDE, CLASSES = 8, 10
SIZES = (6, 6, 6, 6, 6, 6, 3)  # images in a batch; CKA leaves the last out
SHARES = {"unequal": (5, 2), "one has none": (0, 7), "the other has none": (7, 0)}


def vit(seed=0):
    """Two blocks, one of them with gates: every probe has something to measure."""
    return create_model("convit_nano", image_size=SIDE, num_classes=CLASSES, depth=2, gpsa_layers=1, seed=seed)


def convnet(seed=0):
    return create_model("resnet_nano", image_size=SIDE, num_classes=CLASSES, seed=seed)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, SIDE, SIDE, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator))
        for n in SIZES
    ]


def share(rank, shares="unequal"):
    first, _ = SHARES[shares]
    return batches()[:first] if rank == 0 else batches()[first:]


def by_default():
    return [one() for one in FEATURE_PROBES.values()]


def otherwise():
    """The same with what they hold for other options."""
    return [
        Fourier(average="log of mean"),
        AttentionMaps("all"),
        CKA("biased", "all"),
        SpatialOperators("each"),
        Nonlocality("patch embedding"),
        Calibration(3, "paper"),
    ]


def measured(model, data, probes, **options):
    tree = probe(model, data, probes, missing="skip", progress=False, **options)
    return {name: child.to_dataset() for name, child in tree.children.items()} | {"left_out": tree.attrs}


def with_group(build, probes, shares):
    def case(rank):
        return measured(build(), share(rank, shares), probes(), group=dist.group.WORLD)

    return case


def parallel(rank):
    """A model as it is in the middle of a training, and what is left of it."""
    bare = vit().train()
    model = nn.parallel.DistributedDataParallel(bare)
    model(batches()[0][0]).sum().backward()
    before = copy.deepcopy(bare.state_dict()), [p.grad.clone() for p in bare.parameters()]
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    for p in bare.parameters():
        p.register_hook(lambda _: calls.append("backward"))
    ds = fourier(model, share(rank), group=dist.group.WORLD, progress=False)
    after = bare.state_dict(), [p.grad for p in bare.parameters()]
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    return ds, calls, all(module.training for module in model.modules())


def subgroup(rank):
    """A group of one of the processes: the other is not in it, and waits for nobody."""
    alone = dist.new_group([1])
    return fourier(vit(), share(rank), group=alone, progress=False)


class Counted(FeatureProbe):
    """A probe that does not say what of it could be summed."""

    name, title, references, reads = "counted", "", "", "activation"

    def start(self):
        self.count = 0

    def update(self, where, what):
        self.count += 1

    def dataset(self, places):
        return xr.Dataset()


class Unmergeable(Counted):
    """A probe that says what could be summed, and is wrong about it."""

    summed = ("count",)

    def merge(self, state):
        raise TypeError("no way to merge")


def failing(rank):
    """The second rank's third batch is broken."""
    data = share(rank, "one has none" if rank else "the other has none")
    return fourier(vit(), [*data[:2], *([torch.zeros(2, 3)] * rank)], group=dist.group.WORLD, progress=False)


def drifted(rank):
    """Batch norm's statistics are those of each rank's own images."""
    model = convnet().train()
    model(batches()[rank][0])
    return fourier(model, share(rank), group=dist.group.WORLD, progress=False)


class Described(list):
    def __init__(self, rank):
        super().__init__(share(rank))
        self.description = {"dataset": "noise", "share": rank}


def summed(rank, one, data=None, build=vit):
    return one.run(build(), share(rank) if data is None else data, group=dist.group.WORLD, progress=False)


CASES = {
    **{
        f"{build.__name__}, {probes.__name__}, {shares}": with_group(build, probes, shares)
        for build in (vit, convnet)
        for probes in (by_default, otherwise)
        for shares in SHARES
    },
    "another model": lambda rank: cka(
        vit(), share(rank, "one has none"), other=convnet(), group=dist.group.WORLD, progress=False
    ),
    "no group": lambda rank: FeatureVariance().run(vit(), share(rank), progress=False),
    "parallel": parallel,
    "subgroup": subgroup,
    "described": lambda rank: summed(rank, FeatureVariance(), Described(rank)),
    "order of images": lambda rank: summed(rank, FeatureVariance("images")),
    "chosen images": lambda rank: summed(rank, AttentionMaps(images=2)),
    "unknown state": lambda rank: summed(rank, Counted()),
    "no way to merge": lambda rank: summed(rank, Unmergeable()),
    "sizes": lambda rank: summed(rank, Fourier(), [torch.zeros(2, 3, SIDE * (rank + 1), SIDE)], convnet),
    "layers": lambda rank: FeatureVariance().run(
        vit(), share(rank), layers=("local_blocks.0", "global_blocks.0")[rank], group=dist.group.WORLD, progress=False
    ),
    "targets": lambda rank: summed(rank, Calibration(), batches()[0] if rank else batches()[0][0]),
    "empty": lambda rank: summed(rank, Fourier(), []),
    "failing": failing,
    "seeds": lambda rank: fourier(vit(rank), share(rank), group=dist.group.WORLD, progress=False),
    "drifted": drifted,
    "after all errors": lambda rank: summed(rank, FeatureVariance()),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(__file__, tmp_path_factory)


@functools.cache
def in_one_process(build, probes):
    return measured(build(), batches(), probes())


def assert_same(mine, expected, rtol=1e-9):
    """Equal numbers and coordinates, and attributes but for when and over how many ranks."""
    xr.testing.assert_allclose(mine, expected, rtol=rtol, atol=1e-12)
    attributes = {key: value for key, value in mine.attrs.items() if key not in ("history", "ranks")}
    same = {key: value for key, value in expected.attrs.items() if key != "history"}
    assert attributes.keys() == same.keys()
    for key, value in same.items():
        assert attributes[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)


# --- two processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("probes", [by_default, otherwise])
@pytest.mark.parametrize("build", [vit, convnet])
def test_two_processes_give_what_one_gives(found, build, probes, shares):
    expected = in_one_process(build, probes)
    for mine in (one[f"{build.__name__}, {probes.__name__}, {shares}"] for one in found):
        if isinstance(mine, Exception):
            raise mine
        assert mine.keys() == expected.keys() and mine.pop("left_out") == expected["left_out"]
        for name, ds in mine.items():
            assert_same(ds, expected[name])
            assert ds.ranks == 2 and ds.images == (sum(SIZES) - 3 * (name == "cka"))


def test_all_probes_are_compared(found):
    """Those that a model of this kind shows, none left out unseen."""
    names = {name for build in (vit, convnet) for name in in_one_process(build, by_default)} - {"left_out"}
    assert names == set(FEATURE_PROBES)
    assert not in_one_process(vit, by_default)["left_out"]


def test_ranks_have_the_same_dataset_to_the_last_attribute(found):
    for name, ds in found[0]["vit, by_default, unequal"].items():
        if name != "left_out":
            xr.testing.assert_identical(ds, found[1]["vit, by_default, unequal"][name])


def test_another_model(found):
    expected = cka(vit(), batches(), other=convnet(), progress=False)
    for one in found:
        assert_same(one["another model"], expected)


def test_without_a_group_each_has_its_own_numbers(found):
    for rank, one in enumerate(found):
        assert_same(one["no group"], FeatureVariance().run(vit(), share(rank), progress=False))
        assert "ranks" not in one["no group"].attrs
    assert (found[0]["no group"].variance != found[1]["no group"].variance).all()


def test_a_parallel_model_in_training_is_left_as_it_was(found):
    for one in found:
        if isinstance(one["parallel"], Exception):
            raise one["parallel"]
        ds, calls, training = one["parallel"]
        assert_same(ds, fourier(vit(), batches(), progress=False))
        assert not calls and training


def test_a_group_that_a_process_is_not_in(found):
    outside, inside = (one["subgroup"] for one in found)
    assert isinstance(outside, ValueError) and "not in the group" in str(outside)
    assert_same(inside, fourier(vit(), share(1), progress=False))
    assert inside.ranks == 1


def test_descriptions_that_differ_are_left_out(found):
    for one in found:
        assert one["described"].dataset == "noise" and "share" not in one["described"].attrs


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("order of images", "feature_variance cannot be summed over ranks: with over='images'"),
        ("chosen images", "attention_maps cannot be summed over ranks: images="),
        ("unknown state", "counted cannot be summed over ranks: it names no attributes in `summed`"),
        ("sizes", r"rank 1 has images \(channel, y, x\) of \(3, 16, 8\), where rank 0 has \(3, 8, 8\)"),
        ("layers", r"ranks 0 and 1 see other units or attention maps: \[\('global_blocks.0', .*\('local_blocks.0'"),
        ("targets", "calibration: the batch has no targets"),
        ("empty", "the batches were empty"),
        ("failing", "no images"),
        ("seeds", "models that differ in"),
        ("drifted", r"models that differ in \S+running_mean"),
    ],
)
def test_errors_are_those_of_all_ranks(found, case, message):
    for one in found:
        with pytest.raises(ValueError, match=message):
            raise one[case]


def test_the_other_rank_says_which_one_failed(found):
    first, second = (one["no way to merge"] for one in found)
    assert (str(first), str(second)) == ("no way to merge", "rank 0: no way to merge")
    assert type(first) is type(second) is TypeError
    assert str(found[0]["failing"]) == f"rank 1: {found[1]['failing']}"


def test_ranks_are_together_after_every_error(found):
    for one in found:
        assert_same(one["after all errors"], in_one_process(vit, by_default)["feature_variance"])


# --- what is merged ---------------------------------------------------------------------------------


@st.composite
def parts(draw, *shape, least=0):
    """Some chunks of images for each of two processes, far from zero, where sums of squares would cancel."""
    sizes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=2, max_size=2))
    if sum(map(sum, sizes)) <= least:
        sizes[draw(st.integers(0, 1))].append(least + 1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    centre = draw(st.sampled_from([0.0, 1e6]))
    return [[torch.randn(n, *shape, generator=generator).double() + centre for n in mine] for mine in sizes]


def together(make, chunks):
    """What two have that saw a share each, the second one merged into the first."""
    both = [make(), make()]
    for one, mine in zip(both, chunks, strict=True):
        for chunk in mine:
            one.add(chunk)
    both[0].merge(both[1])
    return both


def joined(chunks):
    return torch.cat([chunk for mine in chunks for chunk in mine]).numpy()


@settings(max_examples=50)
@given(parts(2, 3, least=1))
def test_running_mean(chunks):
    one, other = together(RunningMean, chunks)
    x, own = joined(chunks), copy.deepcopy(other.__dict__)
    np.testing.assert_allclose(one.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one.standard_error, x.std(0, ddof=1) / len(x) ** 0.5, rtol=1e-7)
    one.add(chunks[0][0] if chunks[0] else chunks[1][0])  # the other's numbers are not the merged one's memory
    torch.testing.assert_close(other.__dict__, own, rtol=0, atol=0)


@settings(max_examples=50)
@given(parts(3, least=1))
def test_running_covariance(chunks):
    one, _ = together(RunningCovariance, chunks)
    x = joined(chunks)
    np.testing.assert_allclose(one.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one.covariance, np.cov(x.T) / len(x), rtol=1e-7, atol=1e-9)


@settings(max_examples=30)
@given(parts(2, least=1))
def test_unit_mean(chunks):
    """Two units, and the change from the first to the second in each image."""
    units = plan(vit().eval(), batches()[0][0]).units[:2]

    class OfBatches(UnitMean):
        def add(self, batch):
            for unit, values in zip(units, batch.T, strict=True):
                super().add(unit, values)
            self.end_batch()

    one, _ = together(OfBatches, chunks)
    x = joined(chunks)
    found = one.variables(units, "v", long_name="v", units="1")
    for name, values in (("v", x), ("v_change", np.stack([np.full(len(x), np.nan), x[:, 1] - x[:, 0]], 1))):
        np.testing.assert_allclose(found[name][1], values.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found[name + "_se"][1], values.std(0, ddof=1) / len(x) ** 0.5, rtol=1e-6)


@settings(max_examples=30)
@given(parts(3, least=1))
def test_site_mean(chunks):
    """One site has all images; a second one is new to the first process."""
    first, second = plan(vit().eval(), batches()[0][0]).attentions[:2]
    both = [SiteMean(), SiteMean()]
    for one, mine in zip(both, chunks, strict=True):
        for chunk in mine:
            one.add(first, chunk)
    both[1].add(second, torch.eye(3).double())
    both[0].merge(both[1])
    found = both[0].variables([first, second], "v", long_name="v", units="1")
    x = joined(chunks)
    np.testing.assert_allclose(found["v"][1], [x.mean(0), np.full(3, 1 / 3)], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["v_se"][1][0], x.std(0, ddof=1) / len(x) ** 0.5, rtol=1e-7)


@settings(max_examples=30)
@given(parts(1, 2, 3, 3), st.sampled_from([1, 2, 8]))
def test_maps_are_in_the_groups_of_one_process(chunks, groups):
    """Image i of all is in group i modulo the number of groups, as if one process had seen the two shares in turn."""

    def make():
        one = Maps()
        one.groups = groups
        return one

    both = [make(), make()]
    for one, mine in zip(both, chunks, strict=True):
        for chunk in mine:
            one.add("site", chunk)
    both[0].merge(both[1])
    x = joined(chunks)
    assert both[0].images == {"site": len(x)} and both[0].groups == groups
    for group in range(groups):
        mine = x[group::groups]
        np.testing.assert_allclose(both[0].sums["site"][group], mine.sum(0), rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(both[0].powers["site"][group], (mine**2).sum((0, 1, 3, 4)), rtol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 2 * GROUPS + 3), st.integers(0, 2 * GROUPS + 3))
def test_batches_are_in_the_groups_of_one_process(first, second):
    def of_batch(number):
        return _Sums(np.full((2, 2), number), np.full(2, number), np.full(2, number), number + 1)

    both = [Batches(), Batches()]
    for number in range(first + second):
        both[number >= first].add(of_batch(number))
    both[0].merge(both[1])
    numbers = np.arange(first + second)
    assert both[0].batches == first + second
    assert [one.images for one in both[0].sums] == [int((numbers[g::GROUPS] + 1).sum()) for g in range(len(both[0]))]
    assert [int(one.own[0]) for one in both[0].sums] == [int(numbers[g::GROUPS].sum()) for g in range(len(both[0]))]
    assert len(both[0]) == min(first + second, GROUPS)


def test_plain_values_are_merged_by_their_kind():
    assert merged({"a": [1], "b": 2, "c": False}, {"a": [3], "b": 4, "c": True, "d": 5}) == {
        "a": [1, 3],
        "b": 6,
        "c": True,
        "d": 5,
    }
    with pytest.raises(AttributeError):  # nobody says how
        merged(0.5, 0.25)
    assert agreed([{}, {"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "c": 4}]) == {"a": 1}
    assert agreed([{}, {}]) == {}


if __name__ == "__main__":
    run(CASES)
