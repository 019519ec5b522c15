"""Names a user types: what to say when one is unknown."""

import difflib
from collections.abc import Iterable

LISTED = 100  # names that an error lists; other libraries know thousands


def unknown(what: str, given: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a registry: what was given, the nearest names, and all unless too many.

    Args:
        what: the kind of thing, e.g. `"model"`.
        given: the name that was typed.
        known: every name that would have been accepted.

    Returns:
        A `ValueError`, to be raised by the caller.
    """
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(known) if len(known) <= LISTED else f"{len(known)} of them"
    return ValueError(f"unknown {what} {given!r}.{hint} Known: {listed}.")


def require_device(device: str | None) -> None:
    """Refuse a device that is not here, before anything is computed.

    Args:
        device: as typed; `None` is any.

    Raises:
        ValueError: if there is no such device.
    """
    if device is None:
        return
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"there is no device {device!r}: use cpu, cuda or cuda:1.") from None
    if wanted.type == "cuda" and (wanted.index or 0) >= (there := torch.cuda.device_count()):
        raise ValueError(f"there is no device {device!r}, CUDA sees {there}: use cpu, or another number.")
