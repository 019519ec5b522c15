"""Every model of `models.py` times every probe that shares a pass: right numbers, or one sentence saying why not."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracles
import pytest
import torch
import xarray as xr
from models import MODELS, NO_MAPS, Model
from oracles import Place, Tap
from table import PAGE, line
from torch import Tensor, nn

from vitprobe.calling import logits_of, targets_of
from vitprobe.probes import FEATURE_PROBES, lesion, probe

BATCHES = (4, 1)  # the first is what the model is traced on; the last is shorter, as that of a data set


@dataclass
class Run:
    """One model with everything that was measured on it."""

    name: str
    entry: Model
    model: nn.Module
    batches: list[Any]
    before: dict[str, Any]
    after: dict[str, Any]
    bare: list[Tensor]
    watched: list[Tensor]
    found: xr.DataTree
    again: xr.DataTree
    left_out: dict[str, str]

    def __getitem__(self, name: str) -> xr.Dataset:
        """What one probe measured."""
        return self.found[name].to_dataset()

    @property
    def units(self) -> list[Place]:
        """The units that were found."""
        measured = [name for name in ("fourier", "feature_variance") if name in self.found]
        return places(self[measured[0]]) if measured else []

    @property
    def maps(self) -> list[Place]:
        """The attention maps that were found."""
        if "nonlocality" not in self.found:
            return []
        ds = self["nonlocality"]
        heads = ds.nonlocality.notnull().sum("head").values
        keys: list[tuple[int, int] | None] = [None] * len(heads)
        if "key_grid_h" in ds.coords:
            same = self["attention_offsets"].layer_name.values if "attention_offsets" in self.found else []
            others = ~np.isin(ds.layer_name.values, same)
            keys = [
                (int(h), int(w)) if other else None
                for h, w, other in zip(ds.key_grid_h.values, ds.key_grid_w.values, others, strict=True)
            ]
        return [
            Place("map", one.grid, one.prefix, int(count), int(windows), key_grid)
            for one, count, windows, key_grid in zip(places(ds), heads, ds.windows.values, keys, strict=True)
        ]


def places(ds: xr.Dataset) -> list[Place]:
    """The layers of a dataset."""
    columns = (ds[name].values for name in ("kind", "grid_h", "grid_w", "prefix"))
    return [Place(str(kind), (int(h), int(w)), int(prefix)) for kind, h, w, prefix in zip(*columns, strict=True)]


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model, and of the random number generators, that a measurement must leave alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    everywhere = vars(torch.nn.modules.module)
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "wanted": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: [len(getattr(module, hook)) for hook in hooks] for name, module in model.named_modules()},
        "global hooks": [len(everywhere[f"_global{hook}"]) for hook in hooks if f"_global{hook}" in everywhere],
        "grad mode": torch.is_grad_enabled(),
        "torch": torch.get_rng_state(),
        "numpy": [torch.as_tensor(part) for part in np.random.get_state(legacy=False)["state"].values()],
        "python": random.getstate(),
    }


def measure(name: str) -> Run:
    """Build a model and measure it twice with all probes, and once without any."""
    entry = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = entry.build()
    oracles.enliven(model)
    size = entry.image if isinstance(entry.image, tuple) else (entry.image, entry.image)
    images = torch.randn(sum(BATCHES), 3, *size, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(len(images)) % 2
    batches = [entry.batch(*part) for part in zip(images.split(BATCHES), labels.split(BATCHES), strict=True)]
    model.eval()
    with torch.no_grad():
        bare = [logits_of(call(model, batch)).clone() for batch in batches]
    # As in the middle of a training: in training mode but for a frozen part, with a gradient.
    model.train()
    part = next(model.children())
    part.eval()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    parameters[-1].grad = torch.ones_like(parameters[-1])
    watched: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        output = call(model, batch)
        watched.append(logits_of(output).clone())
        return output

    before = state(model)
    found, again = (probe(model, batches, list(every_probe()), forward=forward, missing="skip") for _ in range(2))
    after = state(model)
    model.eval()
    left_out = json.loads(found.attrs.get("left_out", "{}"))
    return Run(name, entry, model, batches, before, after, bare, watched[2:4], found, again, left_out)


def every_probe() -> list[Any]:
    """One of each probe that shares a pass."""
    options: dict[str, dict[str, Any]] = {"calibration": {"resamples": 10}}  # a thousand are a fifth of the time
    return [probe_class(**options.get(name, {})) for name, probe_class in FEATURE_PROBES.items()]


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch, as its library wants it."""
    return model(pixel_values=batch["pixel_values"]) if isinstance(batch, dict) else model(batch[0])


@pytest.fixture(scope="module", params=MODELS)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Every model in turn, measured once for all tests and let go of before the next."""
    yield measure(request.param)


@pytest.fixture(autouse=True)
def known_faults(request: pytest.FixtureRequest, run: Run) -> None:
    """Tests that a known fault of vitprobe lets fail, with the fault."""
    test = request.node.originalname.removeprefix("test_")
    if test in run.entry.faults:
        request.applymarker(pytest.mark.xfail(reason=run.entry.faults[test], strict=True))


def told(value: Any) -> Any:
    """What the entry says, or a skip where it says nothing."""
    if value is None or value == ():
        pytest.skip("the entry does not say it")
    return value


def test_the_output_is_that_of_a_bare_call(run):
    for watched, bare in zip(run.watched, run.bare, strict=True):
        if run.entry.exact:
            assert torch.equal(watched, bare)
        else:  # evaluation takes PyTorch's fused encoder layer, which shows no attention and is not taken when watched
            torch.testing.assert_close(watched, bare, rtol=1e-4, atol=1e-5)


def test_the_model_is_handed_back(run):
    assert run.after.keys() == run.before.keys()
    for what, before in run.before.items():
        assert same(run.after[what], before), what


def same(one: Any, other: Any) -> bool:
    """Whether two nests of mappings, lists and tensors are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_the_same_numbers_twice(run):
    assert set(run.found) == set(run.again)
    for name in run.found:
        assert run.found[name].to_dataset().equals(run.again[name].to_dataset()), name
    assert run.again.attrs.get("left_out") == run.found.attrs.get("left_out")


def test_every_probe_measured_or_said_why_not(run):
    assert set(run.found) | set(run.left_out) == set(FEATURE_PROBES)
    for name in run.found:
        values = {str(variable): array.values for variable, array in run[name].data_vars.items()}
        assert any(np.isfinite(array).any() for array in values.values()), name
        for variable, array in values.items():
            assert not np.isinf(array).any(), (name, variable)
            assert not variable.endswith("_se") or np.nanmin(array, initial=0) >= 0, (name, variable)


def test_refusals(run):
    for name, reason in run.left_out.items():
        assert reason.startswith(f"{name}: ") and reason.endswith(".") and len(reason) < 400, reason
    told(run.entry.maps)
    refused = ({} if run.entry.gates else {"gated attention": "gated sum"}) | run.entry.refused
    expected = {name for name, one in FEATURE_PROBES.items() if one.reads in refused}
    maps = oracles.parse_maps(run.entry.maps)
    if maps and all(one.keys for one in maps):
        refused |= NO_MAPS
        expected |= {name for name, one in FEATURE_PROBES.items() if one.reads == "attention" and not one.other_keys}
    assert set(run.left_out) == expected
    assert all(refused[FEATURE_PROBES[name].reads] in reason for name, reason in run.left_out.items())
    if run.entry.refused:
        with pytest.raises(ValueError) as raised:
            probe(run.model, run.batches[1], [FEATURE_PROBES[name]() for name in run.left_out], progress=False)
        assert str(raised.value) in run.left_out.values()


def test_units(run):
    told(run.entry.units)
    assert oracles.say_units(run.units).split("; ") == run.entry.units.split("; ")


def test_attention_maps(run):
    assert oracles.say_maps(run.maps) == list(told(run.entry.maps))


def test_what_was_left_out(run):
    told(run.entry.maps)
    skipped = json.loads(run[next(iter(run.found))].attrs["skipped"])
    for piece, count in run.entry.skipped.items():
        assert sum(piece in reason for reason in skipped) == count, skipped
    assert len(skipped) == sum(run.entry.skipped.values()), skipped


def test_the_page_lists_it(run):
    told(run.entry.maps)
    assert line(run.name, run) in PAGE.read_text(), "run python tests/matrix/table.py --write"


def test_activations(run):
    taps = told(run.entry.taps)
    units = oracles.parse_units(run.entry.units)
    tapped = range(len(units)) if run.entry.tapped is None else run.entry.tapped
    seen = [record(run, taps, batch) for batch in run.batches]
    assert [len(one) for one in seen] == [len(tapped)] * len(BATCHES)
    images = []
    for unit, *activations in zip(tapped, *seen, strict=True):
        image = np.concatenate([as_image(run, unit, units[unit].grid, *one) for one in activations])
        images.append(image[: BATCHES[0]])
        rows, columns = image.shape[1:3]
        here = {"layer": unit}
        check(run["feature_variance"].isel(here), "variance", oracles.variance(image), rtol=1e-4)
        spectrum = "relative_log_amplitude"
        if np.gcd(rows, columns) > 1:
            check(run["fourier"].isel(here), spectrum, oracles.half_diagonal(image), atol=2e-3)
        periods = {"y": np.fft.fftfreq(rows, 1 / rows).round(), "x": np.fft.fftfreq(columns, 1 / columns).round()}
        check(run["fourier_spectrum"].isel(here).sel(periods), spectrum, oracles.spectrum(image), atol=2e-3)
    cka = run["cka"].cka.isel(layer=list(tapped), layer_other=list(tapped))
    np.testing.assert_allclose(cka, oracles.alike(images), atol=1e-3)


def record(run: Run, taps: Sequence[Tap], batch: Any) -> list[tuple[Tensor, bool]]:
    """What the tapped modules take and give on a batch, and whether channels are last."""
    with torch.no_grad():
        return oracles.record(run.model, taps, lambda model: call(model, batch))


def as_image(run: Run, unit: int, grid: tuple[int, int], x: Tensor, nhwc: bool) -> np.ndarray:
    """A unit's activation in rows and columns."""
    if run.entry.to_image is not None:
        x, nhwc = run.entry.to_image(run.model, unit, x), True
    return oracles.as_image(x, grid, nhwc)


def check(ds: xr.Dataset, name: str, values: np.ndarray, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """Whether a variable is the mean over images, and its error that of the mean; NaN pads places that are smaller."""
    there = ds[name].notnull().values
    error = values.std(0, ddof=1).ravel() / len(values) ** 0.5
    np.testing.assert_allclose(ds[name].values[there], values.mean(0).ravel(), rtol=rtol, atol=atol, err_msg=name)
    np.testing.assert_allclose(ds[f"{name}_se"].values[there], error, rtol=1e-2, atol=max(atol, 1e-4), err_msg=name)


def test_attention(run):
    sites = oracles.parse_maps(told(run.entry.maps))
    if not sites:
        assert "attention" in run.entry.refused
        return
    places = [
        run.entry.places[index]() if index in run.entry.places else oracles.rows(site.grid, site.prefix)
        for index, site in enumerate(sites)
    ]
    keys = [
        run.entry.keys[index]()
        if index in run.entry.keys
        else oracles.middles(site.grid, site.keys)
        if site.keys
        else None
        for index, site in enumerate(sites)
    ]
    wanted = [
        (site.windows, site.heads, lie.shape[1], (lie if there is None else there).shape[1])
        for site, lie, there in zip(sites, places, keys, strict=True)
    ]
    parts = []
    for batch, count in zip(run.batches, BATCHES, strict=True):
        with torch.no_grad():
            maps = oracles.attention_maps(run.model, run.entry.attention, lambda model, batch=batch: call(model, batch))
        parts.append(oracles.choose(maps, wanted, count, run.entry.heads_first))
    chosen = [np.concatenate(maps) for maps in zip(*parts, strict=True)]
    of_own_keys = iter(range(len(sites)))
    for index, (site, map_, lie, there) in enumerate(zip(sites, chosen, places, keys, strict=True)):
        np.testing.assert_allclose(map_.sum(-1), 1, atol=1e-4)
        looks = oracles.Looks(map_, lie, there)
        here = {"layer": index, "head": slice(site.heads)}
        nonlocality = run["nonlocality"].isel(here)
        check(nonlocality, "nonlocality", looks.distance())
        check(nonlocality, "prefix_mass", looks.elsewhere())
        np.testing.assert_allclose(nonlocality.uniform_nonlocality, looks.uniform(), rtol=1e-5)
        check(run["attention_entropy"].isel(here), "entropy", looks.entropy())
        if site.keys:
            continue
        here["layer"] = next(of_own_keys)
        check(run["attention_maps"].isel(here), "attention", looks.middle(site.grid))
        offsets = run["attention_offsets"].isel(here)
        mass = looks.offsets(offsets.offset_y.values, offsets.offset_x.values)
        counted = offsets.mass.notnull().any("head").values
        assert not mass[..., ~counted].any()
        check(offsets, "mass", mass[..., counted])
        operators = run["spatial_operators"].isel(here)
        np.testing.assert_allclose(operators.mean_distance, looks.distance_of_mean(), rtol=1e-3)
    if run.entry.gates:
        gates = [p.sigmoid() for name, p in run.model.named_parameters() if name.endswith(("gating_param", "gate"))]
        np.testing.assert_allclose(run["attention_gates"].gate, torch.stack(gates).detach().numpy(), atol=1e-4)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood."""
    return -logits.double().log_softmax(1)[torch.arange(len(labels)), labels].mean()


def test_answers(run):
    logits = torch.cat(run.bare).double()
    labels = torch.arange(len(logits)) % 2
    measured = run["calibration"]
    np.testing.assert_allclose(measured.nll, losses(logits, labels), rtol=1e-4)
    np.testing.assert_allclose(measured.top1, (logits.argmax(1) == labels).double().mean(), rtol=1e-6)


def test_lesions(run):
    batch = run.batches[1]
    try:
        found = lesion(run.model, batch, forward=call, progress=False)
    except ValueError as error:
        assert str(error).startswith("lesion: no unit can be removed")
        assert str(error).count(": kept: no skip connection") == len(run.units)
        return
    np.testing.assert_allclose(found.intact_nll, losses(run.bare[1], targets_of(batch)), rtol=1e-4)
    removed = [str(text).partition(":")[0] for text in found.removed.values]
    assert set(removed) <= {"residual branch", "bypassed", "kept"}
    assert [text == "kept" for text in removed] == list(found.lesioned_nll.isnull().values)
    if run.entry.branches:
        layers = [layer for layer, text in enumerate(removed) if text == "residual branch"]
        for number, layer in enumerate(layers, start=1):
            with torch.no_grad():
                logits = logits_of(oracles.without(run.model, run.entry.branches, number, lambda m: call(m, batch)))
            wanted = losses(logits, targets_of(batch))
            np.testing.assert_allclose(found.lesioned_nll[layer], wanted, rtol=1e-3, atol=1e-4, err_msg=str(number))
        assert np.ptp(found.lesioned_nll.values[layers]) > 1e-3
