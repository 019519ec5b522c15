"""The study of CKA between units: contrasts of matrices made by hand, verdicts, and a run of it."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from studies.park_kim import similarity
from studies.park_kim.families import grid
from vitprobe.results import stack_runs

STAGES = [0, 0, 0, 0, 1, 1, 1, 1]


def matrix(block: float, nearness: float) -> np.ndarray:
    """CKA that falls by `nearness` with every unit between, and is higher by `block` within a stage."""
    place, stage = np.arange(8), np.array(STAGES)
    return 0.5 - nearness * np.abs(place[:, None] - place) + block * (stage[:, None] == stage)


def one(model: str, seed: int, block: float, nearness: float, accuracy: float, jitter: float) -> xr.Dataset:
    noise = np.random.default_rng([seed, len(model)]).normal(0, jitter)
    cka = matrix(block + noise, nearness)
    grids = [8] * 4 + ([4] * 4 if not model.startswith("vit") else [8] * 4)
    layer = {"kind": ["conv"] * 8, "layer_name": [f"u{i}" for i in range(8)], "grid_h": grids, "grid_w": grids}
    pair = ("layer", "layer_other")
    return xr.Dataset(
        {"cka": (pair, cka), "cka_se": (pair, 0 * cka), "cka_without": (("batch", *pair), np.stack([cka] * 4))},
        coords={
            **{name: ("layer", values) for name, values in layer.items()},
            **{f"{name}_other": ("layer_other", values) for name, values in layer.items()},
            "layer": np.arange(8),
            "layer_other": np.arange(8),
            "batch": np.arange(4),
            "batch_images": ("batch", [100] * 4),
        },
        attrs={"classes": 10, "seed": seed, "accuracy": accuracy + seed + len(model) / 100},
    )


def stacked(seeds=3, accuracy=60.0, jitter=0.002, **models: tuple[float, float]) -> xr.Dataset:
    """Runs of models with a block structure and a fall with distance of their own."""
    names = [name for _ in range(seeds) for name in models]
    return stack_runs(
        [one(name, i // len(models), *models[name], accuracy, jitter) for i, name in enumerate(names)], model=names
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in similarity.verdicts(ds)}


def test_contrasts_by_hand():
    blocks = similarity.contrasts(
        stacked(seeds=1, jitter=0, resnet_micro=(0.2, 0.05), vit_micro=(0.0, 0.05)), "resnet_micro"
    )
    assert blocks.staged.values.tolist() == [True, False]
    # Pairs within stages are 1, 2, 3 apart (twice 3, 2, 1 of them): 5/3 on average; across, 1 to 7 (1 to 4 to 1): 4.
    nearer = 0.05 * (4 - 5 / 3)
    np.testing.assert_allclose(blocks.block_structure, [0.2 + nearer, nearer])
    np.testing.assert_allclose(blocks.block_structure_equal_distance, [0.2, 0.0], atol=1e-12)


def test_stages_of_the_same_lengths():
    assert similarity.proportional([0, 0, 0, 1], 8) == [0] * 6 + [1] * 2
    assert similarity.proportional(STAGES, 8) == STAGES
    assert similarity.proportional([0, 1, 2], 7) == [0, 0, 0, 1, 1, 2, 2]


def test_nearness_alone_is_no_block_structure():
    found = words(stacked(resnet_micro=(0.2, 0.05), vit_micro=(0.0, 0.02)))
    assert found == {
        "E18": "supported",
        "E18 resnet_micro": "supported",
        "E18 equal distance": "supported",
        "E18 equal distance resnet_micro": "supported",
    }
    # A ResNet whose units merely differ more with distance than the ViT's.
    found = words(stacked(resnet_micro=(0.0, 0.08), vit_micro=(0.01, 0.02)))
    assert found["E18"] == "supported"
    assert found["E18 equal distance"] != "supported"


def test_a_vit_with_more_blocks_contradicts_it():
    found = words(stacked(resnet_micro=(0.0, 0.02), vit_micro=(0.2, 0.02)))
    assert set(found.values()) == {"contradicted"}


def test_others_with_stages_are_reported_and_do_not_decide():
    found = words(stacked(resnet_micro=(0.2, 0.0), vit_micro=(0.0, 0.0), alternet_micro=(-0.2, 0.0)))
    assert (found["E18"], found["E18 alternet_micro"]) == ("supported", "contradicted")


def test_pit_and_swin_decide_too():
    blocks = {"resnet_micro": (0.2, 0.0), "pit_micro": (0.2, 0.0), "vit_micro": (0.0, 0.0)}
    assert words(stacked(**blocks, swin_micro=(0.2, 0.0)))["E18"] == "supported"
    found = words(stacked(**blocks, swin_micro=(-0.2, 0.0)))
    assert (found["E18"], found["E18 pit_micro"], found["E18 swin_micro"]) == (
        "contradicted",
        "supported",
        "contradicted",
    )


def test_the_vit_is_cut_as_the_network_that_it_stands_beside():
    ds = stacked(seeds=1, jitter=0, resnet_micro=(0.0, 0.0), pit_micro=(0.0, 0.0), vit_micro=(0.2, 0.0))
    # A PiT whose second stage begins two units later than the ResNet's, where the ViT's blocks do not end.
    later = np.array(8 * [8])
    later[6:] = 4
    for name in ("grid_h", "grid_w", "grid_h_other", "grid_w_other"):
        dims = ds[name].dims
        values = ds[name].values.copy()
        values[1] = later
        ds[name] = (dims, values)
    as_resnet, as_pit = (similarity.contrasts(ds, name) for name in ("resnet_micro", "pit_micro"))
    assert (as_resnet.stages.values[2], as_pit.stages.values[2]) == (str(STAGES), str([0] * 6 + [1] * 2))
    found = {verdict.claim.id: verdict for verdict in similarity.judge(ds, "block_structure", similarity.CLAIMS["E18"])}
    assert found["E18 resnet_micro"].value == pytest.approx(-0.2)
    # Within: 7 of 15 pairs of the first six and the pair of the last two are of one block. Across: 4 of 12.
    assert found["E18 pit_micro"].value == pytest.approx(-0.2 * (8 / 16 - 4 / 12))


@pytest.mark.parametrize("options", [{"accuracy": 30.0}, {"seeds": 1}, {"jitter": 1.0}])
def test_no_evidence(options):
    assert set(words(stacked(resnet_micro=(0.2, 0.0), vit_micro=(0.1, 0.0), **options)).values()) == {"inconclusive"}


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano")
    small = replace(similarity.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    ds = xr.load_dataset(path)
    own = np.diagonal(ds.cka.transpose("run", "layer", "layer_other").values, axis1=1, axis2=2)
    np.testing.assert_allclose(own[np.isfinite(own)], 1)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E18 equal distance" in (path.parent / "claims_smoke.md").read_text()
