"""Which axes of an activation are the image, and which tokens are not patches."""

import math

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st

from vitprobe.attach import Layout, infer_layout
from vitprobe.attach.layout import MAX_PREFIX

SQUARE, TALL = (224, 224), (224, 112)


@pytest.mark.parametrize(
    ("shape", "image", "expected"),
    [
        ((2, 196, 8), SQUARE, Layout("bnc", (14, 14), 0)),
        ((2, 197, 8), SQUARE, Layout("bnc", (14, 14), 1)),
        ((2, 198, 8), SQUARE, Layout("bnc", (14, 14), 2)),  # distillation token
        ((2, 201, 8), SQUARE, Layout("bnc", (14, 14), 5)),  # four registers
        ((2, 50, 8), SQUARE, Layout("bnc", (7, 7), 1)),
        ((2, 730, 8), SQUARE, Layout("bnc", (27, 27), 1)),
        ((2, 99, 8), TALL, Layout("bnc", (14, 7), 1)),
        ((197, 2, 8), SQUARE, Layout("nbc", (14, 14), 1)),
        ((2, 8, 56, 56), SQUARE, Layout("bchw", (56, 56))),
        ((2, 56, 56, 8), SQUARE, Layout("bhwc", (56, 56))),
        ((2, 8, 28, 14), TALL, Layout("bchw", (28, 14))),
        ((2, 28, 14, 8), TALL, Layout("bhwc", (28, 14))),
        ((2, 8, 15, 7), (60, 30), Layout("bchw", (15, 7))),  # one row gained to rounding
        ((2, 8, 1, 1), SQUARE, Layout("bchw", (1, 1))),
        ((2, 10), SQUARE, None),
        ((64, 49, 8), SQUARE, None),  # windows
        ((2, 8, 28, 14), SQUARE, None),
        ((2, 3, 197, 64), SQUARE, None),  # heads
        ((2, 3, 8, 14, 14), SQUARE, None),
    ],
)
def test_shapes(shape, image, expected):
    assert infer_layout(shape, batch=2, image=image) == expected


def test_what_the_model_declares_counts_where_it_leaves_a_grid():
    # 9 tokens are 3x3, or 2x2 and five others
    assert infer_layout((2, 9, 8), batch=2, image=SQUARE) == Layout("bnc", (3, 3), 0)
    assert infer_layout((2, 9, 8), batch=2, image=SQUARE, declared=5) == Layout("bnc", (2, 2), 5)
    # ConViT's class token joins late: it declares one, and its first blocks have none
    assert infer_layout((2, 196, 8), batch=2, image=SQUARE, declared=1) == Layout("bnc", (14, 14), 0)


def test_what_the_user_says_counts_always():
    assert infer_layout((2, 9, 8), batch=2, image=SQUARE, declared=0, prefix=5) == Layout("bnc", (2, 2), 5)
    assert infer_layout((2, 9, 8), batch=2, image=SQUARE, prefix=1) is None


def test_operations_around_it_decide_between_two_readings():
    shape = (2, 14, 14, 14)
    assert infer_layout(shape, batch=2, image=SQUARE, channels_last=True) == Layout("bhwc", (14, 14))
    assert infer_layout(shape, batch=2, image=SQUARE, channels_last=False) == Layout("bchw", (14, 14))
    assert infer_layout((2, 8, 8, 32), batch=2, image=SQUARE, channels_last=False) is None  # not 8x8 of 32 channels


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    patch=st.integers(1, 16),
    prefix=st.integers(0, 9),
)
def test_fewest_prefix_tokens_that_leave_the_image(rows, columns, patch, prefix):
    image = (rows * patch, columns * patch)
    tokens = rows * columns + prefix
    layout = infer_layout((2, tokens, 8), batch=2, image=image)
    assert layout.tokens == tokens and layout.prefix <= prefix
    h, w = layout.grid
    assert h * columns == w * rows, "the grid has not the aspect ratio of the image"
    ratio = (rows // math.gcd(rows, columns), columns // math.gcd(rows, columns))
    fewer = [tokens - p for p in range(layout.prefix)]
    assert not any(math.isqrt(n // (ratio[0] * ratio[1])) ** 2 * ratio[0] * ratio[1] == n for n in fewer)
    # With the true number given, there is only one answer.
    assert infer_layout((2, tokens, 8), batch=2, image=image, prefix=prefix) == Layout("bnc", (rows, columns), prefix)


def test_no_more_prefix_tokens_than_any_model_has():
    # the largest square below 2^2 + 40 that is near enough; never 40 registers
    assert infer_layout((2, 44, 8), batch=2, image=SQUARE) == Layout("bnc", (6, 6), 8)
    assert infer_layout((2, 16**2 + MAX_PREFIX, 8), batch=2, image=SQUARE) is None


@given(
    axes=st.sampled_from(["bchw", "bhwc", "bnc", "nbc"]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    prefix=st.integers(0, 3),
)
def test_split_puts_every_number_in_its_place(axes, rows, columns, prefix):
    patches = torch.arange(2 * rows * columns * 3).reshape(2, rows, columns, 3)
    others = -1 - torch.arange(2 * prefix * 3).reshape(2, prefix, 3)
    tokens = torch.cat([others, rearrange(patches, "b h w c -> b (h w) c")], dim=1)
    x = {
        "bchw": rearrange(patches, "b h w c -> b c h w"),
        "bhwc": patches,
        "bnc": tokens,
        "nbc": rearrange(tokens, "b n c -> n b c"),
    }[axes]
    layout = Layout(axes, (rows, columns), prefix if len(axes) == 3 else 0)
    activation = layout.split(layout.batch_first(x))
    assert torch.equal(activation.patches, patches)
    assert torch.equal(activation.prefix, others if len(axes) == 3 else others[:, :0])
