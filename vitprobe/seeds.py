"""Seeds derived from a seed and a purpose, so that no two purposes share a stream and nothing depends on order."""

import hashlib
import json


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed that depends on nothing but its arguments.

    Args:
        seed: the run's seed.
        *purpose: what the numbers are for, e.g. `("order", epoch)`.

    Returns:
        An integer that `torch.Generator.manual_seed` and `numpy.random.default_rng` accept.
    """
    text = json.dumps([seed, *purpose])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
