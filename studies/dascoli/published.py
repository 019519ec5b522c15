"""Numbers printed in the tables of d'Ascoli et al. (2021): ImageNet, 224 px, one training each.

DeiT-Ti, -S and -B are of Touvron et al. 2021. Where the paper prints a number twice, each table has its own here.
"""

from typing import NamedTuple


class Form(NamedTuple):
    """A row of Table 1.

    Attributes:
        heads: per layer.
        width: channels of a token.
        parameters: [million].
        multiply_adds: of one image, which the paper calls FLOPs [billion].
        speed: images a second of one GP100 at a batch of 128.
        accuracy: top-1 [%].
    """

    heads: int
    width: int
    parameters: float
    multiply_adds: float
    speed: float
    accuracy: float


TABLE_1 = {
    "DeiT-Ti": Form(3, 192, 6, 1, 1442, 72.2),
    "ConViT-Ti": Form(4, 192, 6, 1, 734, 73.1),
    "DeiT-Ti+": Form(4, 256, 10, 2, 1036, 75.9),
    "ConViT-Ti+": Form(4, 256, 10, 2, 625, 76.7),
    "DeiT-S": Form(6, 384, 22, 4.3, 587, 79.8),
    "ConViT-S": Form(9, 432, 27, 5.4, 305, 81.3),
    "DeiT-S+": Form(9, 576, 48, 10, 480, 79.0),
    "ConViT-S+": Form(9, 576, 48, 10, 382, 82.2),
    "DeiT-B": Form(12, 768, 86, 17, 187, 81.8),
    "ConViT-B": Form(16, 768, 86, 17, 141, 82.4),
    "DeiT-B+": Form(16, 1024, 152, 30, 114, 77.5),
    "ConViT-B+": Form(16, 1024, 152, 30, 96, 82.5),
}
"""Form and accuracy by model."""

TABLE_2 = {0.05: (34.8, 47.8), 0.1: (48.0, 59.6), 0.3: (66.1, 73.7), 0.5: (74.6, 78.2), 1.0: (79.9, 81.4)}
"""Top-1 accuracy [%] of DeiT-S and ConViT-S by the share of the images; the text has 46.5 and 59.5 at 0.1."""

TABLE_3 = {
    "a": (82.2, 59.7),
    "b": (82.0, 57.4),
    "c": (81.4, 56.9),
    "d": (81.6, 54.6),
    "e": (79.1, 47.8),
    "f": (78.6, 54.3),
    "g": (73.7, 44.8),
}
"""Top-1 accuracy [%] of the ablations of ConViT-S+ with all and with 10 % of the images, by row."""

TABLE_4 = {"DeiT-S": (79.8, 80.9), "DeiT-B": (81.8, 83.0), "ConViT-S+": (82.2, 82.9)}
"""Top-1 accuracy [%] without and with hard distillation from a RegNetY-16GF."""

TABLE_5 = {"DeiT-Ti": (72.2, 38.3), "ConViT-Ti": (73.1, 67.1)}
"""Top-1 accuracy [%] with the absolute position codes and without them at test time."""

TABLE_6 = {0: (73.1, 73.1), 3: (62.3, 63.5), 5: (35.0, 53.1), 10: (1.3, 46.8)}
"""Top-1 accuracy [%] of ConViT-Ti with content and with position masked, by how many of the first gated layers."""
