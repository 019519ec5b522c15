"""One training in several processes: whose gradients and batch statistics are those of all images."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from vitprobe.ranks import Group, Ranks

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def in_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The module whose backward pass averages gradients over the processes; of one process, the model itself."""
    if ranks.group is None:
        return model
    device = ranks.device
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, process_group=ranks.group
    )


def gradients_stay(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A `with` in which gradients add up in each process, for the next backward pass after it to average."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


@contextlib.contextmanager
def no_unused() -> Iterator[None]:
    """Says what to do where processes wait for the gradient of a parameter that none is computed of."""
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" not in str(error):
            raise
        raise ValueError(
            "some parameters get no gradient, and several processes wait for it: freeze them"
            " (parameter.requires_grad_(False)), or train in one process."
        ) from error


@contextlib.contextmanager
def same_statistics(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Batch normalisation over the images of all processes, for the length of a `with`."""
    if ranks.group is None:
        yield
        return
    norms = [module for module in model.modules() if type(module) in _NORMS]
    others = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, (*_NORMS, nn.SyncBatchNorm))
    } | {type(module).__name__ for module in model.modules() if isinstance(module, _NORMS) and module not in norms}
    if others:
        warnings.warn(
            f"{', '.join(sorted(others))} normalise over the images of each process for itself: convert them first,"
            " e.g. by timm.layers.convert_sync_batchnorm.",
            stacklevel=2,
        )
    kinds = [type(module) for module in norms]
    summed = _summing(_SummedBatchNorm if ranks.device.type == "cpu" else nn.SyncBatchNorm, ranks.group)
    try:
        for module in norms:
            module.__class__ = summed
        yield
    finally:
        for module, kind in zip(norms, kinds, strict=True):
            module.__class__ = kind


@functools.lru_cache(maxsize=4)
def _summing(base: type[nn.Module], group: Group) -> type[nn.Module]:
    """A class that the group stands in.

    So parameters, buffers, hooks and attributes of a module that becomes one stay what they are, a copy of it needs no
    copy of the group, and what was compiled for it serves again in the next epoch.
    """
    return type(base.__name__, (base,), {"process_group": group})


class _SummedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation over all processes on a CPU, where PyTorch's own is not to be had."""

    process_group: Any

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        others = [dim for dim in range(x.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        values = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        # Two sums, one after the other: a mean square less a squared mean would be all rounding far from zero.
        count = values.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([values.sum(others), count]), group=self.process_group)
        total = sums[-1]
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        variance = all_reduce(centred.square().sum(others), group=self.process_group) / total
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), share)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        """Of one, two or three dimensions: whichever class this stands for."""
