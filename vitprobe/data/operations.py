"""What can be done to an image in random augmentation: the operations of Pillow, on many images at once.

RandAugment and its relatives are defined by what Pillow makes of an 8-bit image, and trained with it. Each function
here takes uint8 images `(image, channel, y, x)`, each with its own strength, and gives what Pillow gives, to the grey
level: Pillow cuts fractions off where it blends and interpolates, and rounds where it smooths. Grey images go through
as Pillow's mode "L".
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Fill = Sequence[int] | int
Operation = Callable[[Tensor, Tensor, Fill], Tensor]

_LEVELS = 256


def grey(images: Tensor) -> Tensor:
    """Brightness as `0.299 R + 0.587 G + 0.114 B`, in the integers of ITU-R 601 as Pillow has them.

    Args:
        images: uint8 `(image, channel, y, x)`, 1 or 3 channels.

    Returns:
        uint8 `(image, 1, y, x)`.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)


def _blend(plain: Tensor, images: Tensor, arguments: Tensor) -> Tensor:
    """From `plain` (factor 0) over the image (1) and beyond, in the single precision of Pillow's blend."""
    plain = plain.float()
    # Two roundings and not one fused: the tail of a tensor may be computed by other instructions than its body.
    mixed = (images.float() - plain).mul_(_strength(arguments).float()).add_(plain)
    return mixed.clamp_(0, _LEVELS - 1).to(torch.uint8)


def _strength(arguments: Tensor) -> Tensor:
    return arguments[:, 0].reshape(-1, 1, 1, 1)


def identity(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """The images as they are."""
    return images


def autocontrast(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 255."""
    pixels = images.double()
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    scale = pixels.new_tensor(_LEVELS - 1) / (high - low)
    stretched = (pixels * scale - low * scale).clamp_(0, _LEVELS - 1).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Each channel's histogram made flat."""
    count, channels, height, width = images.shape
    pixels = images.flatten(2).long()
    rows = torch.arange(count * channels, device=images.device).reshape(count, channels, 1) * _LEVELS
    counts = torch.zeros(count * channels * _LEVELS, dtype=torch.int64, device=images.device)
    places = (rows + pixels).flatten()
    counts = counts.scatter_add_(0, places, torch.ones_like(places)).reshape(count, channels, _LEVELS)
    brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (height * width - brightest) // (_LEVELS - 1)
    below = counts.cumsum(2) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=_LEVELS - 1)
    flat = table.gather(2, pixels).to(torch.uint8).reshape(images.shape)
    # Without steps there is nothing to spread: one grey level, or too few pixels beside the brightest.
    return torch.where((step > 0).unsqueeze(3), flat, images)


def invert(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Dark for bright."""
    return _LEVELS - 1 - images


def posterize(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """The first bits of each pixel, 0 to 8 of them; with none the image is black."""
    step = 2 ** (8 - _strength(arguments).long())
    return (images.long() // step * step).to(torch.uint8)


def solarize(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Pixels at or above a threshold inverted."""
    return torch.where(images < _strength(arguments), images, _LEVELS - 1 - images)


def solarize_add(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Pixels of the darker half made brighter by so many grey levels."""
    brighter = (images + _strength(arguments)).clamp_(max=_LEVELS - 1).to(torch.uint8)
    return torch.where(images < _LEVELS // 2, brighter, images)


def brightness(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Away from black by a factor."""
    return _blend(torch.zeros_like(images[:, :1, :1, :1]), images, arguments)


def contrast(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Away from the image's mean brightness by a factor."""
    pixels = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3), keepdim=True)
    return _blend((2 * total + pixels) // (2 * pixels), images, arguments)


def color(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Away from the grey image by a factor; a grey image stays what it is."""
    return _blend(grey(images), images, arguments)


def sharpness(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Away from the smoothed image by a factor. The outermost pixels are not smoothed."""
    rows = images.int()
    columns = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    sums = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:]
    smooth = images.clone()
    # Weights of 1 around 5, thirteen in all, rounded.
    smooth[..., 1:-1, 1:-1] = sums.add_(rows[..., 1:-1, 1:-1], alpha=4).add_(6).floor_divide_(13)
    return _blend(smooth, images, arguments)


def nearest(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """An affine map to the nearest pixel, in Pillow's fixed-point coordinates of 16 bits."""
    a, b, c, d, e, f = arguments[:, :6].T
    centred = torch.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5])
    a, b, c, d, e, f = _columns((centred * 2**16 + 0.5).floor().long())
    x, y = _axes(images, torch.int64)
    x, y = (a * x + b * y + c) >> 16, (d * x + e * y + f) >> 16
    return _filled(_taken(images, _flat(images, x, y)), x, y, fill)


def _columns(numbers: Tensor) -> tuple[Tensor, ...]:
    """`(number, image)` as numbers `(image, 1, 1)`."""
    return numbers[:, :, None, None].unbind()


def _axes(images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Coordinates of all pixels: x as `(1, x)`, y as `(y, 1)`."""
    height, width = images.shape[2:]
    x = torch.arange(width, dtype=dtype, device=images.device)
    y = torch.arange(height, dtype=dtype, device=images.device)
    return x[None], y[:, None]


def _flat(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Places in an image read row by row; beyond the edge, the nearest in it."""
    height, width = images.shape[2:]
    return x.clamp(0, width - 1) + y.clamp(0, height - 1) * width


def _taken(images: Tensor, places: Tensor) -> Tensor:
    """Pixels at places `(image, ...)`, as `(image, channel, ...)`."""
    count, channels = images.shape[:2]
    index = places.reshape(count, 1, -1).expand(-1, channels, -1)
    return images.flatten(2).gather(2, index).reshape(count, channels, *places.shape[1:])


def _filled(images: Tensor, x: Tensor, y: Tensor, fill: Fill) -> Tensor:
    """The fill colour where coordinates `(image, y, x)` lie outside of the image."""
    height, width = images.shape[2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    colour = torch.tensor(fill, dtype=torch.uint8).to(images.device, non_blocking=True).reshape(-1, 1, 1)
    return torch.where(inside.unsqueeze(1), images, colour)


def along_x(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Each row moved: the pixel centred at `(x, y)` comes from `(x + b y + c, y)`."""
    shear, offset, reach = _columns(arguments[:, :3].T)
    width = images.shape[3]
    x, y = _axes(images, torch.float64)
    offset = shear * (y + 0.5) + offset
    start = offset.floor()
    # All pixels of a row lie equally far from their neighbours, so one window of the row serves them all.
    window = torch.arange(-1, width + 2, device=images.device)
    pixels = _taken(images, _flat(images, start.long() + window, y.long())).double()
    points = [pixels[..., i : i + width] for i in range(4)]
    mixed = _curve(points, (offset - start).unsqueeze(1), reach.unsqueeze(1))
    return _filled(_cut(mixed), x + 0.5 + offset, y, fill)


def along_y(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """Each column moved: the pixel centred at `(x, y)` comes from `(x, y + b x + c)`."""
    return along_x(images.mT, arguments, fill).mT


def affine(images: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """An affine map: the pixel centred at `(x, y)` comes from `(a x + b y + c, d x + e y + f)`."""
    a, b, c, d, e, f, reach = _columns(arguments.T)
    x, y = (axis + 0.5 for axis in _axes(images, torch.float64))
    x, y = a * x + b * y + c, d * x + e * y + f
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    right, down = ((one - 0.5 - whole).unsqueeze(1) for one, whole in ((x, left), (y, top)))
    height, width = images.shape[2:]
    columns = [(left.long() + i).clamp_(0, width - 1) for i in range(-1, 3)]
    rows = [(top.long() + i).clamp_(0, height - 1).mul_(width) for i in range(-1, 3)]
    pixels, reach = images.double(), reach.unsqueeze(1)
    # One row of four points at a time, and not all sixteen at once: the numbers stay in the cache.
    mixed = [_curve([_taken(pixels, row + column) for column in columns], right, reach) for row in rows]
    return _filled(_cut(_curve(mixed, down, reach)), x, y, fill)


def _curve(points: Sequence[Tensor], t: Tensor, reach: Tensor) -> Tensor:
    """Through the second of four points at 0 and the third at 1, in double precision as Pillow's.

    A straight line with a reach of 0; with a reach of 1, a cubic that heeds the outer points too (Keys 1981, with
    a = -1 as in Pillow).
    """
    near, far = (points[0] - points[1]).mul_(reach), (points[2] - points[3]).mul_(reach)
    slope = points[2] - points[1] - near
    twist = near.neg().sub_(far)
    bend = near.mul_(2).add_(far)
    return twist.mul_(t).add_(bend).mul_(t).add_(slope).mul_(t).add_(points[1])


def _cut(mixed: Tensor) -> Tensor:
    return mixed.clamp_(0, _LEVELS - 1).to(torch.uint8)


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        identity,
        autocontrast,
        equalize,
        invert,
        posterize,
        solarize,
        solarize_add,
        brightness,
        contrast,
        color,
        sharpness,
        nearest,
        along_x,
        along_y,
        affine,
    )
}
"""By name. Each takes images, `(image, 7)` numbers in double precision of which it uses the first, and a fill colour.

Photometric ones use one number or none. `nearest` and `affine` use the `a, b, c, d, e, f` of an affine map, `along_x`
and `along_y` its `b, c`; those that interpolate, one more for how: 0 linearly, 1 by cubics.
"""
CODES: dict[str, int] = {name: code for code, name in enumerate(OPERATIONS)}
"""The number of each operation."""
ARGUMENTS = 7
"""As many numbers as any operation uses."""


def operate(images: Tensor, codes: Tensor, arguments: Tensor, fill: Fill) -> Tensor:
    """One operation on each image, those with the same one together.

    Args:
        images: uint8 `(image, channel, y, x)`, left as they are.
        codes: `(image,)` numbers of operations, see `CODES`.
        arguments: float64 `(image, 7)`, the operation's numbers first.
        fill: grey level, or one for each channel, where a map reaches beyond the image.

    Returns:
        Images of the same shape and dtype.
    """
    order = codes.argsort(stable=True)
    sizes = codes.bincount(minlength=len(OPERATIONS)).tolist()
    arguments, there, back = (one.to(images.device, non_blocking=True) for one in (arguments, order, order.argsort()))
    changed = images.index_select(0, there)
    parts = zip(OPERATIONS.values(), changed.split(sizes), arguments.index_select(0, there).split(sizes), strict=True)
    for operation, part, numbers in parts:
        if operation is not identity and len(part) > 0:
            part.copy_(operation(part, numbers, fill))
    return changed.index_select(0, back)
