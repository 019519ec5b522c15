"""A trace as images: the layout of every activation of one forward pass."""

import math
from collections.abc import Iterable

import numpy as np

from vitprobe.attach.layout import Layout, arranged, infer_layout
from vitprobe.attach.trace import Trace

SEVERAL = ("chunk", "split", "tensor_split", "unbind")  # give parts of an activation, and are known by the first


class Reading:
    """A trace with the layouts of its nodes.

    Args:
        trace: of one forward pass.
        batch: images in it.
        image: `(height, width)` of the images [pixels].
        prefix: tokens before the patches, as the user says.
        declared: the same as the model says.
    """

    def __init__(
        self, trace: Trace, batch: int, image: tuple[int, int], prefix: int | None, declared: int | None
    ) -> None:
        self.trace = trace
        self.batch = batch
        self.image = image
        self.prefix = prefix
        self.declared = declared
        self._layouts: dict[int, Layout | None] = {}

    def layout(self, node: int | None) -> Layout | None:
        """How a node holds the image; `None` if it is none, or there is no node."""
        if node is None:
            return None
        if node not in self._layouts:
            one = self.trace.nodes[node]
            layout = self.infer(one.shape, one.channels_last)
            if one.places is not None and self.prefix is None:
                layout = arranged(*one.places, batch=self.batch, image=self.image, layout=layout)
            self._layouts[node] = layout
        return self._layouts[node]

    def why_no_image(self, node: int) -> str:
        """Why several tokens that are known to lie somewhere are no image; empty if they are one, or it is lost."""
        one = self.trace.nodes[node]
        if one.places is None or self.prefix is not None or self.layout(node) is not None:
            return ""
        places = one.places[0]
        if places.size < 2 * self.batch:
            return ""
        if np.isnan(places).all():
            return "no token lies anywhere in the image (object queries, latents)"
        return "the tokens fill no grid (dropped, or in an order of its own in each image)"

    def infer(self, shape: tuple[int, ...], channels_last: bool | None = None) -> Layout | None:
        """The layout that a shape alone tells."""
        return infer_layout(
            shape,
            batch=self.batch,
            image=self.image,
            prefix=self.prefix,
            declared=self.declared,
            channels_last=channels_last,
        )

    def grid(self, node: int) -> tuple[int, int] | None:
        """Rows and columns of a node."""
        layout = self.layout(node)
        return layout.grid if layout else None

    def is_map(self, node: int) -> bool:
        """Whether a node is one activation with more than one position."""
        if self.trace.nodes[node].event.function in SEVERAL:
            return False
        layout = self.layout(node)
        return layout is not None and math.prod(layout.grid) > 1

    def mixes(self, nodes: Iterable[int]) -> bool:
        """Whether one of the nodes mixes channels or positions."""
        return any(self.trace.nodes[n].op in ("attention", "kernel", "conv", "linear") for n in nodes)
