"""What probing costs, side by side in one run: time and memory of all feature probes over the bare forward pass.

    python tests/benchmarks/probe_overhead.py [--rounds 5] [--threads 2] [--device cpu]

Prints, for a CIFAR ViT and a ViT-Ti at 224 pixels with batches of 64: the time of all feature probes together over
the bare pass in the same round (median and range of the ratios), the peak memory of a process that probes over one
that does not, and the half-diagonal spectrum against the full two-dimensional transform.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

CASES = {
    "ViT 192x6, patch 4, 32 px": ("vitprobe", {"image_size": 32, "patch_size": 4, "dim": 192, "depth": 6}, 32, 8),
    "timm ViT-Ti/16, 224 px": ("timm", {"model_name": "vit_tiny_patch16_224"}, 224, 2),
}
MAPS = [(56, 64, 96), (28, 64, 192), (14, 64, 192), (8, 64, 192), (7, 64, 768)]  # side, images, channels


def build(case: str, device: str):
    source, options, size, count = CASES[case]
    torch.manual_seed(0)
    if source == "timm":
        import timm

        model = timm.create_model(**options)
    else:
        from vitprobe.models import create_model

        model = create_model("vit", **options)
    batches = [torch.randn(64, 3, size, size, device=device) for _ in range(count)]
    return model.eval().to(device), batches


def bare(model, batches) -> None:
    with torch.no_grad():
        for batch in batches:
            model(batch)


def probed(model, batches) -> None:
    from vitprobe.probes import FEATURE_PROBES, probe

    probe(model, batches, [probe_class() for probe_class in FEATURE_PROBES.values()], progress=False)


def seconds(action, device: str) -> float:
    start = time.perf_counter()
    action()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def ratios(slow, fast, rounds: int, device: str) -> tuple[list[float], float, float]:
    """Ratios of two actions timed in turn, after one warm-up of each; and the median seconds of both."""
    slow(), fast()
    pairs = [(seconds(slow, device), seconds(fast, device)) for _ in range(rounds)]
    return [a / b for a, b in pairs], *(statistics.median(column) for column in zip(*pairs, strict=True))


def show(name: str, values: list[float], goal: str) -> None:
    median = statistics.median(values)
    print(f"  {name:<44} {median:6.2f}  ({min(values):.2f} to {max(values):.2f})  goal {goal}", flush=True)


def peak_memory(case: str, action: str, threads: int) -> float:
    """Peak resident memory of a fresh process that runs one action [MiB]."""
    command = [sys.executable, __file__, "--child", json.dumps([case, action]), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(case: str, action: str) -> None:
    import vitprobe.probes  # noqa: F401  (both processes hold the same libraries)

    model, batches = build(case, "cpu")
    {"bare": bare, "probed": probed, "none": lambda *_: None}[action](model, batches)
    # Not getrusage: a child's maximum there starts at its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        return child(*json.loads(arguments.child))

    from vitprobe.probes import FEATURE_PROBES
    from vitprobe.probes.fourier import half_diagonal

    device = arguments.device
    print(f"torch {torch.__version__}, {device}, {arguments.threads} threads, {arguments.rounds} rounds")
    print("\nall feature probes together over the bare pass, time: " + ", ".join(FEATURE_PROBES))
    for case in CASES:
        model, batches = build(case, device)
        values, slow, fast = ratios(
            lambda m=model, b=batches: probed(m, b), lambda m=model, b=batches: bare(m, b), arguments.rounds, device
        )
        show(f"{case} ({slow:.2f} s over {fast:.2f} s)", values, "at most 1.3")
    if device == "cpu" and Path("/proc/self/status").exists():
        print("\nthe same, peak memory of the whole process")
        for case in CASES:
            memory = {action: peak_memory(case, action, arguments.threads) for action in ("bare", "probed")}
            value = memory["probed"] / memory["bare"]
            show(f"{case} ({memory['probed']:.0f} over {memory['bare']:.0f} MiB)", [value], "at most 1.2")
    print("\nfull fft2 over half-diagonal, time")
    for side, images, channels in MAPS:
        x = torch.randn(images, side, side, channels, device=device)
        maps = x.permute(0, 3, 1, 2).contiguous()
        values, slow, fast = ratios(
            lambda m=maps: torch.fft.fft2(m).abs(), lambda y=x: half_diagonal(y), arguments.rounds, device
        )
        show(
            f"{images} x {side}x{side} x {channels} ({slow * 1e3:.1f} ms over {fast * 1e3:.1f} ms)",
            values,
            "at least 8",
        )


if __name__ == "__main__":
    main()
