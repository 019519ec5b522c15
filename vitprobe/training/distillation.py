"""Hard distillation: a teacher's decisions as labels (Touvron et al. 2021; d'Ascoli et al. 2021, Table 4)."""

import torch
from torch import Tensor, nn

from vitprobe.calling import logits_of
from vitprobe.training.checkpoint import digest


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
        self.digest = digest(model.state_dict())

    @torch.no_grad()
    def decisions(self, images: Tensor) -> Tensor:
        """The class of the largest output `(batch,)` of images `(batch, channel, height, width)`."""
        return logits_of(self.model(images)).argmax(1)
