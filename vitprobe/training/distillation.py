"""Hard distillation: a teacher's decisions as labels (Touvron et al. 2021; d'Ascoli et al. 2021, Table 4)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitprobe.calling import logits_of
from vitprobe.training.checkpoint import digest, plain_names


class Teacher:
    """A network that decides, and does not learn.

    Args:
        model: any module from `(batch, channel, height, width)` to `(batch, class)`, in evaluation mode; moved to the
            device.
        device: where the images will be.

    Attributes:
        digest: the sha256 of its weights: a run resumed with another teacher is another run.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.to(device)
        self.digest = digest(plain_names(model.state_dict()))

    @torch.no_grad()
    def decisions(self, images: Tensor) -> Tensor:
        """The class of the largest output `(batch,)` of images `(batch, channel, height, width)`."""
        return logits_of(self.model(images)).argmax(1)


@contextlib.contextmanager
def two_outputs(model: nn.Module) -> Iterator[None]:
    """Networks with a distillation token, ours and timm's, give both outputs in training, for the length of a `with`.

    Args:
        model: any; one without such a token is left alone.
    """
    heads = ("distilled_head", "head_dist")
    told = [
        module
        for module in model.modules()
        if hasattr(module, "set_distilled_training") and any(getattr(module, head, None) is not None for head in heads)
    ]
    before = [module.distilled_training for module in told]
    try:
        for module in told:
            module.set_distilled_training(True)  # type: ignore[operator]
        yield
    finally:
        for module, value in zip(told, before, strict=True):
            module.set_distilled_training(value)  # type: ignore[operator]
