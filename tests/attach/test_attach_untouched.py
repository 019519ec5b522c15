"""A watched model is handed back as it was, whatever wraps it and however the pass ends."""

import copy
from collections import UserDict

import pytest
import torch
from handwritten import PostNormEncoder, TinyViT
from torch import nn

from vitprobe.attach import Watch, plan
from vitprobe.attach.trace import names_of
from vitprobe.calling import default_forward, first_images, images_of, logits_of, to_model, untouched, unwrap
from vitprobe.models import create_model
from vitprobe.probes import hessian_eigenvalues, loss_landscape

GLOBAL_HOOKS = [name for name in vars(torch.nn.modules.module) if name.startswith("_global_")]
HOOKS = [name for name in vars(nn.Linear(1, 1)) if "hook" in name]


def state(model):
    """Everything of a model and of the process that a probe could leave behind."""
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [copy.copy(getattr(module, name)) for module in model.modules() for name in HOOKS],
        "global hooks": [copy.copy(getattr(torch.nn.modules.module, name)) for name in GLOBAL_HOOKS],
        "identity": [id(p) for p in model.parameters()],
        "dtype": [p.dtype for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "numbers": [x.clone() for x in model.state_dict().values()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "random": torch.get_rng_state(),
        "modes": torch._C._len_torch_function_stack(),
        "gradients on": torch.is_grad_enabled(),
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def assert_same(before, after):
    for key in before:
        pairs = (
            zip(before[key], after[key], strict=True) if isinstance(before[key], list) else [(before[key], after[key])]
        )
        for a, b in pairs:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key


def with_dropout():
    """A network in mixed modes, with batch statistics, dropout, a gradient and a hook of the user's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Dropout(0.5)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )
    model[1].eval()
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    model[0].weight.requires_grad_(False)
    model[3].register_forward_hook(lambda module, args, output: None)
    return model


def watch_all(model, x, on_unit=lambda unit, activation: None):
    with untouched(model):
        found = plan(model, x)
        return Watch(model, found, on_unit=on_unit, on_attention=lambda site, maps: None)(default_forward, model, x)


def test_model_is_as_it_was():
    model = with_dropout()
    assert [module.training for module in model.modules()].count(False) == 1
    before = state(model)
    watch_all(model, torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    assert_same(before, state(model))


def test_model_is_as_it_was_after_an_exception_in_the_forward_pass():
    model = with_dropout()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def break_now(module, args):
        torch.rand(3)
        raise OverflowError("the fan stopped")

    handle = model[5].register_forward_pre_hook(break_now)
    before = state(model)
    with pytest.raises(OverflowError, match="the fan stopped"):
        watch_all(model, x)
    assert_same(before, state(model))
    handle.remove()
    with torch.no_grad():
        assert torch.equal(watch_all(model, x), copy.deepcopy(model).eval()(x))


def test_model_is_as_it_was_after_an_interrupt_in_a_probe():
    model = with_dropout()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = state(model)

    def interrupt(unit, activation):
        if unit.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch_all(model, x, on_unit=interrupt)
    assert_same(before, state(model))


def test_exceptions_that_a_model_catches_do_not_shift_the_rest():
    class Forgiving(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fragile, self.mlp = nn.Conv2d(3, 12, 4, 4), nn.Linear(7, 7), nn.Linear(12, 12)

        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            try:
                x = self.fragile(x)
            except RuntimeError:
                x = x + self.mlp(x)
            return x.mean(1)

    model = Forgiving()
    with untouched(model):
        found = plan(model, torch.randn(2, 3, 16, 16))
    assert [unit.name for unit in found.units] == ["Forgiving", "Forgiving#2"]
    watch_all(model, torch.randn(3, 3, 16, 16))


def test_train_of_the_model_is_called_on_the_way_back():
    class Merging(nn.Linear):
        """An adapter as some libraries write it: evaluation mode changes the weight, training mode changes it back."""

        def train(self, mode=True):
            if mode != self.training:
                self.weight.data += 1.0 if not mode else -1.0
            return super().train(mode)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2), nn.AdaptiveAvgPool1d(4), nn.Flatten(), Merging(16, 2))
    weight = model[4].weight.detach().clone()
    with untouched(model):
        assert not torch.equal(model[4].weight, weight)
    torch.testing.assert_close(model[4].weight.detach(), weight)


def test_probe_operations_in_a_modules_return_are_not_the_models():
    class Root(nn.Module):
        """`bmm` is called in the same frame as the module that is watched."""

        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12), nn.Linear(12, 5)

        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            y = self.norm(x)
            return self.head((x + torch.bmm(torch.bmm(y, y.mT).softmax(-1), y)).mean(1))

    model, shapes = Root(), []
    x = torch.randn(2, 3, 16, 16)
    with untouched(model):
        found = plan(model, x, layers="norm")
        Watch(
            model,
            found,
            on_unit=lambda unit, activation: torch.bmm(activation.patches[0], activation.patches[0].mT),
            on_attention=lambda site, maps: shapes.append(tuple(maps.shape)),
        )(default_forward, model, x)
    assert shapes == [(2, 1, 1, 16, 16)]


def test_pass_that_runs_other_operations_is_an_error():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = create_model("vit_nano", image_size=8, seed=0)

        def forward(self, x):
            if len(x) == 3:
                return self.net.head(self.net.norm(self.net.patches(x)).mean(1))
            return self.net(x)

    model = Fickle()
    with untouched(model):
        found = plan(model, torch.randn(2, 3, 8, 8))
        watch = Watch(model, found, on_unit=lambda unit, activation: None)
        with pytest.raises(RuntimeError, match="the forward pass changed since it was traced"):
            watch(default_forward, model, torch.randn(3, 3, 8, 8))


def test_no_activation_outlives_its_pass():
    import gc
    import weakref

    model = create_model("vit_nano", image_size=8, seed=0)
    kept = []
    model.blocks[0].mlp.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    watch_all(model, torch.randn(2, 3, 8, 8))
    gc.collect()
    assert len(kept) == 3 and all(reference() is None for reference in kept)


# --- wrappers ---------------------------------------------------------------------------------------


def test_wrappers_come_off_in_any_nesting():
    import torch.distributed as dist

    model = nn.Linear(3, 3)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(nn.DataParallel(model))) is model
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    assert unwrap(torch.compile(nn.DataParallel(compiled), backend="eager")) is model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert unwrap(torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")) is model
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_what_cannot_be_watched_is_refused_in_words():
    model = nn.Linear(3, 3)
    for scripted in (torch.jit.script(model), torch.jit.trace(model, torch.randn(1, 3))):
        with pytest.raises(TypeError, match=r"TorchScript .* give the nn\.Module it was made from"):
            unwrap(nn.DataParallel(scripted))

    class FSDPModule:
        """As `fully_shard` does it: it puts this class of its own among the bases of the model's class."""

    class FSDPLinear(FSDPModule, nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"FSDP .* unsharded"):
        unwrap(FSDPLinear(3, 3))
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not function"):
        unwrap(lambda x: x)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_modules_are_named_and_run_as_written():
    model = create_model("vit_nano", image_size=8, seed=0)
    x = torch.randn(2, 3, 8, 8)
    with untouched(model):
        names = [unit.name for unit in plan(model, x).units]
    assert names[0] == "ViT"
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2].compile(backend="eager")
    with torch.no_grad():
        model(x)
    assert not any("_orig_mod" in name for name in names_of(model).values())
    with untouched(model):
        found = plan(model, x)
    assert [unit.name for unit in found.units] == names
    assert [site.name for site in found.attentions] == [f"blocks.{i}.attention" for i in range(4)]
    with untouched(model):
        found = plan(model, x, layers="blocks.*")
    assert [unit.name for unit in found.units] == [f"blocks.{i}" for i in range(4)]


def test_encoder_fast_path_is_seen():
    model = PostNormEncoder(batch_first=True).eval()
    with untouched(model):
        found = plan(model, torch.randn(2, 3, 16, 16))
    assert [site.name for site in found.attentions] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


# --- batches ----------------------------------------------------------------------------------------

IMAGES, LABELS = torch.randn(4, 3, 8, 8), torch.arange(4)


class Keywords(nn.Module):
    """Takes keyword arguments, and would compute a loss if it got labels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, pixel_values, scale=1.0, labels=None, label=None):
        assert labels is None and label is None
        return {"logits": self.conv(pixel_values).mean((2, 3)) * scale}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mapping_is_keyword_arguments_without_labels(kind):
    model = Keywords()
    batch = kind({"pixel_values": IMAGES, "scale": 2.0, "labels": LABELS, "label": LABELS})
    assert torch.equal(default_forward(model, batch)["logits"], model.conv(IMAGES).mean((2, 3)) * 2)
    moved = to_model(batch, model.double())
    assert images_of(moved).dtype == torch.float64 and moved["labels"].dtype == torch.int64
    assert default_forward(model, moved)["logits"].dtype == torch.float64


@pytest.mark.parametrize("batch", [IMAGES, (IMAGES, LABELS), [IMAGES, LABELS, "train"], (IMAGES,)])
def test_tensor_or_sequence_that_starts_with_one(batch):
    model = nn.Conv2d(3, 2, 3)
    assert torch.equal(default_forward(model, batch), model(IMAGES))
    assert torch.equal(images_of(batch), IMAGES)
    assert len(images_of(first_images(batch, 2))) == 2


def test_first_images_cuts_everything_that_has_one_entry_per_image():
    batch = {"x": IMAGES, "y": (LABELS, "text"), "mean": torch.zeros(3), "t": torch.tensor(0.5)}
    cut = first_images(batch, 3)
    assert [len(cut["x"]), len(cut["y"][0]), len(cut["mean"]), cut["y"][1]] == [3, 3, 3, "text"]
    assert cut["t"].ndim == 0


@pytest.mark.parametrize("batch", [7, "images", [], [[IMAGES]], None])
def test_other_batches_are_answered_in_words(batch):
    with pytest.raises(TypeError, match=r"a batch is .* give forward=lambda model, batch"):
        default_forward(nn.Identity(), batch)


@pytest.mark.parametrize("batch", [IMAGES.byte(), (LABELS,), {"x": IMAGES[0]}, object()])
def test_batches_without_images_are_answered_in_words(batch):
    with pytest.raises(ValueError, match=r"no images \(batch, channel, y, x\).*\.float\(\)"):
        images_of(batch)


def test_logits_of_what_models_return():
    logits = torch.randn(2, 3)
    classifier = type("Output", (), {"logits": logits})()
    for output in (logits, (logits, IMAGES), {"loss": LABELS, "logits": logits}, classifier, [[logits]]):
        assert logits_of(output) is logits
    with pytest.raises(TypeError, match="returned NoneType with no tensor"):
        logits_of(None)


def test_model_without_parameters_gets_its_batch_as_it_is():
    assert to_model(IMAGES.double(), nn.Identity()).dtype == torch.float64


def test_watched_output_is_bit_identical():
    torch.manual_seed(0)
    x = torch.randn(3, 3, 16, 16)
    for model in (
        create_model("convit", image_size=16, dim=16, depth=2, gpsa_layers=1, seed=0),
        create_model("alternet_micro", image_size=16, seed=0),
        TinyViT(nn.functional.scaled_dot_product_attention, prefix=2),
    ):
        with torch.no_grad():
            plain = copy.deepcopy(model).eval()(x)
        assert torch.equal(watch_all(model, x), plain)


def test_a_module_that_is_registered_twice_gets_its_own_tensors_back():
    """All blocks of Model I share one position code: stacked cells and batches replace it, and leave nothing behind."""
    model = create_model("model_1_nano", image_size=8, position="learned", seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batches = [(x[:2], torch.tensor([0, 1])), (x[2:], torch.tensor([2, 3]))]
    measured = []
    for stack in (1, 2):
        surface = loss_landscape(model, batches, points=3, pairs=1, stack=stack, progress=False)
        spectrum = hessian_eigenvalues(model, batches, k=2, stack=stack, progress=False)
        measured.append((surface.nll.values, spectrum.eigenvalue.values))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    for one, other in zip(*measured, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), rtol=1e-3, atol=1e-4)
