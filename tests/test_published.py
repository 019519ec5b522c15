"""The published numbers against the values as they were noted from the figures, and the claims against the numbers."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vitprobe.claims import CLAIMS
from vitprobe.published import park_kim_2022
from vitprobe.published.claims_park_kim import PAPER

NUMBERS = park_kim_2022()
RESNET, VIT, MIXER = (NUMBERS["cifar100_error_nll"][name] for name in ("ResNet-50", "ViT-Ti", "MLP-Mixer-Ti"))
NOISE = NUMBERS["noise_freq_delta_acc_pct"]
SPECTRA, KERNELS, ALTERNET = (NUMBERS[f"hessian_warmup_{figure}"] for figure in ("fig4", "localmsa", "alternet"))


def robustness(name: str) -> list[float]:
    """Accuracy and mean accuracy on corrupted images of the model whose key starts so."""
    (found,) = (pair for key, pair in NUMBERS["acc_vs_robustness_cifar100c"].items() if key.startswith(f"{name} ("))
    return found


@pytest.mark.parametrize(
    ("value", "noted", "within"),
    [
        (RESNET["error_pct"], 17.26, 0),
        (VIT["nll_train"], 2.522, 0),
        (NUMBERS["local_msa_kernel"]["3x3"]["error_pct"], 27.89, 0),
        (NUMBERS["local_msa_kernel"]["5x5"]["nll_train"], 2.406, 0),
        (NOISE["ResNet-50"][8], -15.38, 0),
        (NOISE["ViT-Ti"][2], -14.93, 0),
        (SPECTRA["ViT"]["nep_if_same_yscale"], 0.07, 0.005),
        (SPECTRA["ViT(6%)"]["nep_if_same_yscale"], 0.28, 0.005),
        (SPECTRA["ViT"]["ape"], 47, 0.5),
        (SPECTRA["ViT"]["mode_left"], -31, 0.5),
        (SPECTRA["ResNet"]["ape"], 489, 0.5),
        (KERNELS["P=5x5"]["nep_if_same_yscale"], 0.19, 0.005),
        (ALTERNET["AlterNet"]["ape"], 434, 0.5),
        (ALTERNET["AlterNet"]["nep"], 0.0055, 0.00005),
        (NUMBERS["alternet_acc_vs_msa_number"]["then c2 (from 3)"][1][1], 84.02, 0),
        (robustness("Alter-ResNet-50")[1], 66.67, 0),
        (NUMBERS["variance_resnet50_cifar100"][13], 0.836, 0),
        (NUMBERS["variance_vit_ti_cifar100"][24], 0.0927, 0),
        (NUMBERS["fourier_vit_ti_highfreq_by_depth"][2], -2.648, 0),
        (NUMBERS["fourier_resnet50_imagenet"][0][-1][1], -6.60, 0),
        (NUMBERS["label_entropy_floor_nats"]["CIFAR-100"], 1.203, 0),
        (NUMBERS["lesion_swin_ti"][6]["delta_acc_pct"], -1.44, 0),
    ],
)
def test_numbers_are_as_noted(value, noted, within):
    assert value == pytest.approx(noted, rel=0, abs=within)


def test_every_series_says_how_it_was_read():
    assert "poster" in NUMBERS["source"]
    series = set(NUMBERS) - {"source", "notes", "lesion_note"}
    assert set(NUMBERS["notes"]) == series | {"all"}
    assert all(note.endswith(".") for note in NUMBERS["notes"].values())


def test_two_readings_of_a_figure_agree():
    curves = NUMBERS["fourier_vit_ti_imagenet"]
    by_depth = NUMBERS["fourier_vit_ti_highfreq_by_depth"]
    assert [curve[-1][1] for curve in curves] == pytest.approx(by_depth, abs=0.0011)
    # Half-diagonals of maps of 56, 28, 14 and 7 pixels a side: (h + 1) // 2 samples, from the stem to the last block.
    assert [len(curve) for curve in NUMBERS["fourier_resnet50_imagenet"]] == [28] * 4 + [14] * 4 + [7] * 6 + [4] * 3
    for spectrum in (*SPECTRA.values(), *KERNELS.values()):
        share = spectrum["area_left"] / (spectrum["area_left"] + spectrum["area_right"])
        assert spectrum["nep_if_same_yscale"] == pytest.approx(share)


def test_one_copy_for_all():
    assert park_kim_2022() is NUMBERS


def test_read_where_there_is_no_folder(tmp_path):
    import vitprobe.published

    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("vitprobe/__init__.py", "")
        for file in Path(vitprobe.published.__file__).parent.iterdir():
            if file.is_file():
                packed.write(file, f"vitprobe/published/{file.name}")
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); from vitprobe import published; "
        "print('.zip' in published.__file__, published.park_kim_2022()['lesion_swin_ti'][2]['delta_acc_pct'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["True", "-1.96"]


# --- the claims' numbers ---------------------------------------------------------------------------------


def changes(series: str) -> np.ndarray:
    return np.diff(NUMBERS[series])


def published() -> dict[str, list[str]]:
    """What each claim must say was published, from the numbers."""
    fourier, variance = changes("fourier_vit_ti_highfreq_by_depth"), changes("variance_vit_ti_cifar100")
    resnet = np.delete(changes("variance_resnet50_cifar100"), [3, 7, 13])  # less those that change the grid
    kernel = NUMBERS["local_msa_kernel"]
    steps = NUMBERS["alternet_acc_vs_msa_number"]
    (alone, alone_c), (alter, alter_c) = robustness("ResNet-50"), robustness("Alter-ResNet-50")
    nep = {name: f"{one['nep_if_same_yscale']:.2f}" for name, one in (SPECTRA | KERNELS).items()}
    return {
        "E1": [
            f"error {RESNET['error_pct']} %, loss {RESNET['nll_train']} nats",
            f"ViT-Ti ({VIT['error_pct']} %, {VIT['nll_train']})",
            f"MLP-Mixer-Ti ({MIXER['error_pct']} %, {MIXER['nll_train']})",
        ],
        "E3": [f"{nep['ViT']} for ViT-Ti", f"{nep['ResNet']} for ResNet-50"],
        "E4": [f"{nep['ViT(6%)']} with 6 %", f"{nep['ViT']} with all"],
        "E5": [f"{SPECTRA['ViT']['ape']:.0f} for ViT-Ti", f"{SPECTRA['ResNet']['ape']:.0f} for ResNet-50"],
        "E8": [
            f"{kernel['5x5']['error_pct']} % for 5 x 5, {kernel['8x8(global)']['error_pct']} % for global",
            f"{kernel['5x5']['nll_train']} and {kernel['8x8(global)']['nll_train']} nats",
            f"{nep['P=3x3']}, {nep['P=5x5']} and {nep['P=8x8']} for 3 x 3, 5 x 5",
        ],
        "E9": [f"{MIXER['error_pct']} % for MLP-Mixer-Ti", f"{VIT['error_pct']} % for ViT-Ti"],
        "E14": [
            f"{(fourier[::2] < 0).sum()} of {len(fourier[::2])} attention",
            f"{(fourier[1::2] > 0).sum()} of {len(fourier[1::2])} MLP",
        ],
        "E15": [
            f"at 0.9 pi ResNet-50 loses {-NOISE['ResNet-50'][8]} percentage points, ViT-Ti {-NOISE['ViT-Ti'][8]}",
            f"at 0.3 pi {-NOISE['ResNet-50'][2]} and {-NOISE['ViT-Ti'][2]}",
        ],
        "E16": [
            f"{(variance[::2] < 0).sum()} of {len(variance[::2])} attention",
            f"{(variance[1::2] > 0).sum()} of {len(variance[1::2])} MLP",
            f"{(resnet > 0).sum()} of {len(resnet)} convolution",
        ],
        "E20": [
            f"{steps['c4 (0,1,2 MSAs)'][0][1]} % without, {steps['then c2 (from 3)'][1][1]} % with four",
            f"costs {steps['then c3'][1][1] - steps['then c3'][2][1]:.2f} percentage points",
        ],
        "E21": [
            f"accuracy {alter} % and {alone} %",
            f"images {alter_c} % and {alone_c} %",
            f"APE about {ALTERNET['AlterNet']['ape']:.0f} and {ALTERNET['ResNet']['ape']:.0f}",
            f"NEP about {ALTERNET['AlterNet']['nep']:.4f} and {ALTERNET['ResNet']['nep']:.4f}",
        ],
    }


@pytest.mark.parametrize(("name", "texts"), published().items(), ids=published())
def test_claims_say_the_numbers(name, texts):
    assert CLAIMS[name].paper == PAPER
    assert [text for text in texts if text not in CLAIMS[name].published] == []


def test_models_rank_alike_by_error_and_by_training_loss():
    models = list(NUMBERS["cifar100_error_nll"].values())
    by_error = sorted(models, key=lambda model: model["error_pct"])
    assert by_error == sorted(models, key=lambda model: model["nll_train"])
    assert len(models) == 7 and "correlation 1 over seven" in CLAIMS["E1"].published


def test_noise_curves_cross_once_between_half_and_six_tenths():
    gap = np.subtract(NOISE["ViT-Ti"], NOISE["ResNet-50"])
    (place,) = np.flatnonzero(np.diff(np.sign(gap)))
    assert (NOISE["freq_pi"][place], NOISE["freq_pi"][place + 1]) == (0.5, 0.6)
    assert gap[0] < 0 and "between 0.5 and 0.6 pi" in CLAIMS["E15"].published


def test_variance_of_the_resnet_is_largest_at_the_ends_of_its_stages():
    blocks = np.split(NUMBERS["variance_resnet50_cifar100"][1:], np.cumsum([3, 4, 6]))
    assert sum(int(stage.argmax()) == len(stage) - 1 for stage in blocks) == 4
    assert "4 of 4 stages" in CLAIMS["E17"].published


def test_lesions_of_the_swin():
    units = NUMBERS["lesion_swin_ti"]
    ends = {"MSA": 0, "MLP": 0}
    for stage in (1, 2, 3, 4):
        for kind, end in (("MSA", -1), ("MLP", 0)):
            costs = [unit["delta_acc_pct"] for unit in units if (unit["stage"], unit["unit"]) == (stage, kind)]
            below = [-np.inf if cost is None else cost for cost in costs]  # off the plot
            ends[kind] += below[end] == min(below)
    assert ends == {"MSA": 2, "MLP": 4}
    said = CLAIMS["E19"].published
    assert "the first costs most in 4 of 4 stages, of the attentions the last in 2 of 4" in said
    assert "0.60 against 0.22, and 1.44 against 0.42" in said
    assert [unit["delta_acc_pct"] for unit in units if unit["stage"] == 2] == [-0.42, -0.6, -1.44, -0.22]
