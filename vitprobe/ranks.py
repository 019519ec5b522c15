"""What the processes of a `torch.distributed` group do together: sums, objects passed on, errors all hear of."""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group: TypeAlias = "dist.ProcessGroup | None"
T = TypeVar("T")

_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TypeError)}


class Ranks:
    """The processes of a group; with `None` this one alone, and nothing here waits for anybody.

    Every rank calls the same methods in the same order, as with `torch.distributed` itself: each of them waits for
    all. Tensors travel on the device they are on, or on the CPU where the group has no way from there.

    Args:
        group: of `torch.distributed`, or `None`.
        device: of this rank's model.

    Attributes:
        count: number of ranks.
        rank: of this process, from 0.
        device: of its model.

    Raises:
        ValueError: if this process is not in the group, or the group reaches neither the device nor the CPU.
    """

    def __init__(self, group: Group, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.count, self.rank = 1, 0
        self.device = self._carrier = torch.device(device)
        if group is None:
            return
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: call it on the group's own ranks, or without group=.")
        self.count = dist.get_world_size(group)
        reached = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
        if self.device.type not in reached:
            if "cpu" not in reached:
                raise ValueError(
                    f"the model is on {self.device} and the group ({dist.get_backend(group)}) reaches {reached} only: "
                    "move the model there, or give a group of gloo: torch.distributed.new_group(backend='gloo')."
                )
            self._carrier = torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor, to the last bit the same on all.

        Args:
            tensor: of one shape and type on all ranks; it may be written to.

        Returns:
            The sum, on the device of the tensor.
        """
        if self.group is None:
            return tensor
        total = tensor.to(self._carrier).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def gathered(self, value: T) -> list[T]:
        """What each rank has, in their order, on all of them; for small things without tensors."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        with self._on_device():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: T, take: Callable[[T], None]) -> None:
        """Hand to rank 0 what the others have, in their order, one after the other in memory, tensors on the CPU.

        Args:
            value: of this rank.
            take: called on rank 0 with the value of every other rank; an error there is one everywhere.
        """
        failed: Exception | None = None
        with self.together():
            mine = b"" if self.first else _packed(value)
        for rank in range(1, self.count):
            told = self._from(rank, mine)
            if self.first and failed is None:
                try:
                    take(_unpacked(told))
                except Exception as error:  # the others are still handing over
                    failed = error
        with self.together():
            if failed is not None:
                raise failed

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks; an error there is one everywhere."""
        if self.group is None:
            return make()
        with self.together():
            mine = _packed(make()) if self.first else b""
        return cast(T, _unpacked(self._from(0, mine)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What each rank does for itself inside the `with`, all have done after it; an error on one is raised on all.

        Without it the others would wait for the one that failed. Nothing inside may wait for another rank.

        Raises:
            ValueError: on the other ranks, with the number of the failed one and its message; or `TypeError`, as
                there; or `RuntimeError` for any other kind.
        """
        try:
            yield
        except Exception as error:
            self.gathered((type(error).__name__, str(error)))
            raise
        for rank, failed in enumerate(self.gathered(("", ""))):
            if failed[0]:
                kind = _ERRORS.get(failed[0], RuntimeError)
                raise kind(f"rank {rank}: {failed[1] if kind is not RuntimeError else ': '.join(failed)}")

    def require_same(self, model: nn.Module) -> None:
        """Refuse models of other weights or buffers on other ranks: what is measured is one model.

        Raises:
            ValueError: naming what differs, on all ranks.
        """
        if self.group is None:
            return
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        everywhere = self.gathered({name: _digits(tensor) for name, tensor in named.items()})
        names = dict.fromkeys(name for one in everywhere for name in one)
        if other := [name for name in names if len({one.get(name) for one in everywhere}) > 1]:
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            raise ValueError(
                f"the ranks have models that differ in {', '.join(other[:3])}{more}: batch norm's statistics do in a "
                "training, where each rank sees its own images. Give all ranks those of one, e.g. for t in "
                "model.state_dict().values(): torch.distributed.broadcast(t, 0)."
            )

    def _from(self, rank: int, mine: bytes) -> bytes:
        """The bytes of one rank, on all."""
        assert self.group is not None
        box = [mine]
        with self._on_device():
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, rank), group=self.group)
        return box[0]

    def _on_device(self) -> AbstractContextManager[Any]:
        """Where objects travel through a GPU, it is the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def agreed(said: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """The entries that are the same on all ranks that have any."""
    some = [one for one in said if one] or [{}]
    return {key: value for key, value in some[0].items() if all(key in one and one[key] == value for one in some)}


def merged(mine: Any, theirs: Any) -> Any:
    """What two processes measured, as one has it that saw the images of the first and then those of the second.

    Mappings are merged key by key, lists follow each other, counts are added, flags are raised if either is, and what
    has a method `merge` takes the other in.

    Args:
        mine: of the first; may be changed.
        theirs: of the second, of the same kind.

    Returns:
        Both together.
    """
    if isinstance(mine, dict):
        return mine | {key: merged(mine[key], value) if key in mine else value for key, value in theirs.items()}
    if isinstance(mine, bool):
        return mine or theirs
    if isinstance(mine, int | list):
        return mine + theirs
    mine.merge(theirs)
    return mine


def _digits(tensor: Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(whole.numpy().data).hexdigest()[:16]


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    # Written by another process of this program, and statistics are objects of its own.
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
