"""What probes hold: sums whose size does not depend on the number of images, and no activation beyond its batch."""

import gc
import importlib
import types
import weakref
from collections import defaultdict

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.models import create_model
from vitprobe.probes import (
    CKA,
    FEATURE_PROBES,
    AttentionMaps,
    FeatureProbe,
    FeatureVariance,
    Fourier,
    Nonlocality,
    probe,
)
from vitprobe.probes.calibration import NODES

cka_module = importlib.import_module("vitprobe.probes.cka")  # the package's name `cka` is the function

BATCH, SIDE, CLASSES = 8, 8, 10
FEW, TIMES = 2, 10  # batches, and how many times as many
MORE = BATCH * FEW * (TIMES - 1)  # images

# Bytes that a probe holds of every image, and how its docstring says it; of all others it is nothing. Calibration: the
# logarithm of the confidence at every node in single precision, the confidence in double, and right or wrong.
PER_IMAGE = {"calibration": (4 * NODES + 8 + 1, "0.3 kB")}

# Probes with other options than by default, one of a name in each pass.
OTHER_OPTIONS = [
    [Fourier(average="log of mean"), FeatureVariance("images"), AttentionMaps("all"), CKA("biased", "all")],
    [Fourier(along="radius"), Nonlocality("patch embedding"), AttentionMaps("all", images=[0, 7])],
]
PROBES = [[one() for one in FEATURE_PROBES.values()], *OTHER_OPTIONS]


def build():
    """Two blocks, one of them with gates: every probe has something to measure."""
    return create_model("convit_nano", image_size=SIDE, num_classes=CLASSES, depth=2, gpsa_layers=1, seed=0)


def stream(count):
    """Batches that nobody else holds."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        yield torch.randn(BATCH, 3, SIDE, SIDE, generator=generator), labels


# --- what is held -----------------------------------------------------------------------------------


def reachable(root):
    """Every object that can be reached from one, code left out."""
    seen, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.CodeType):
            continue
        seen[id(one)] = one
        if isinstance(one, types.FunctionType):  # not its globals
            waiting += [one.__closure__, one.__defaults__]
        elif isinstance(one, np.ndarray):
            waiting.append(one.base)
        else:
            waiting += gc.get_referents(one)
    return seen.values()


def held(root):
    """Bytes of the tensors and arrays that can be reached from an object, memory that several share once."""
    objects = reachable(root)
    storages = [one.untyped_storage() for one in objects if isinstance(one, Tensor)]
    arrays = [one.nbytes for one in objects if isinstance(one, np.ndarray) and one.base is None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) + sum(arrays)


def entries(root):
    """How many entries the plain containers have together that can be reached from an object."""
    return sum(len(one) for one in reachable(root) if isinstance(one, list | tuple | dict | set))


def test_what_is_held_is_counted():
    """Views count as what they keep alive, shared memory counts once, wherever it lies."""

    class Holder:
        __slots__ = ("inside",)

    x, array, holder = torch.zeros(100), np.zeros(50), Holder()
    for inside in (x, x[:1], [x, {"y": x[5:], 3: (x.numpy()[2:],)}], lambda: x, {x}, nn.Parameter(x)):
        holder.inside = inside
        assert held(holder) == 400
    holder.inside = [x, array[3:], array]
    assert held(holder) == 400 + 400
    holder.inside = [0.5, {"a": 2.5, "b": [1, 1, 1]}]
    assert held(holder) == 0 and entries(holder) == 2 + 2 + 3


# --- after the pass ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passes():
    """Of every probe: bytes and entries held, and bytes of the dataset, after few and after many images."""
    found = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cka_module, "GROUPS", FEW)  # of batches, whose sums are kept: 64
        for probes in PROBES:
            for count in (FEW, FEW * TIMES):
                tree = probe(build(), stream(count), probes, progress=False)
                for one in probes:
                    found[described(one)].append((held(one), entries(one), tree[one.name].to_dataset().nbytes))
    return found


def described(one):
    return " ".join([one.name, *map(str, one.config().values())])


@pytest.mark.parametrize("one", [one for probes in PROBES for one in probes], ids=described)
def test_memory_does_not_grow_with_the_images(one, passes):
    few, many = passes[described(one)]
    per_image, words = PER_IMAGE.get(one.name, (0, ""))
    assert few[0] > 0 and few[2] > 0
    assert many[0] - few[0] == per_image * MORE
    assert many[2] == few[2]
    if per_image:
        assert "Held in memory" in type(one).__doc__ and words in type(one).__doc__
        assert per_image <= 1000 * float(words.removesuffix(" kB"))
    else:
        assert many[1] == few[1]


@pytest.mark.parametrize("queries", ["middle", "all"])
def test_chosen_maps_are_kept_in_single_precision(queries):
    """Four bytes for each number of the images asked for and of their maps, as is said where they are too many."""
    sizes = []
    for chosen in (1, 5):
        one = AttentionMaps(queries, images=chosen)
        one.run(build(), stream(2), progress=False)
        sizes.append(held(one))
    patches, heads, layers = 16, 4, 2
    asking = patches if queries == "all" else 1
    assert sizes[1] - sizes[0] == 4 * 4 * (layers * heads * asking * (patches + 1) + 3 * SIDE**2)


# --- during the pass --------------------------------------------------------------------------------


class Alive:
    """Which of the activations of a model are alive: hooks on all of its modules keep weak references to them.

    Attributes:
        seen: for every module that returned, how many activations of this batch were alive then, logits left out.
    """

    def __init__(self, model):
        self.logits = type(model).__name__
        self.weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
        self.restart()
        for module in model.modules():
            module.register_forward_hook(self.note)

    def restart(self):
        self.references, self.seen = {}, []

    def note(self, module, args, output):
        storage = output.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.references[weakref.ref(storage)] = type(module).__name__
        self.seen.append(sum(name != self.logits for name in self.now()))

    def now(self):
        return [name for reference, name in self.references.items() if reference() is not None]


def test_references_tell_whether_memory_is_alive():
    alive = Alive(module := nn.Identity())
    for kept in (lambda x: x, lambda x: x[:1], lambda x: x.numpy(), lambda x: x.mT.detach()):
        alive.restart()
        views = [kept(module(torch.ones(2, 3)))]
        assert alive.now() == ["Identity"]
        views.clear()
        assert alive.now() == []


class Maps(FeatureProbe):
    """Keeps weak references to the attention maps that are handed over.

    Attributes:
        before: at every update, how many of the maps of other layers were alive.
    """

    name = "maps"
    title = references = ""
    reads = "attention"

    def start(self):
        self.shown, self.before = [], []

    def update(self, where, what):
        self.before.append(self.alive())
        self.shown.append(weakref.ref(what.untyped_storage()))

    def alive(self):
        return sum(reference() is not None for reference in self.shown)

    def dataset(self, places):
        return xr.Dataset()


@pytest.mark.parametrize("probes", PROBES, ids=lambda probes: " and ".join(one.name for one in probes))
def test_no_activation_outlives_its_batch(probes):
    """And inside of the last batch none lives longer than without probes; but the logits are the pass's to keep."""
    model = build().eval()
    alive = Alive(model)
    with torch.no_grad():
        for images, _ in stream(1):
            model(images)
    bare = alive.seen
    assert len(bare) > 20 and max(bare) < 10
    between, maps = [], Maps()

    def batches():
        for batch in stream(3):
            alive.restart()
            yield batch
            del batch
            between.append((alive.now(), maps.alive()))

    tree = probe(model, batches(), [*probes, maps], progress=False)
    assert len(tree.children) == len(probes) + 1
    assert (alive.now(), maps.alive()) == ([], 0)
    assert between == [([alive.logits], 0)] * 3
    assert maps.before == [0] * 3 * 2  # batches and layers
    assert alive.seen[-len(bare) :] == bare
