"""Stages before the packer: lossy quantizers and lossless shuffles.

Quantizers round numbers to the nearest of fewer levels and return the largest error.
`normalized_image` stores one uint8 per value. `uint16` stores linear counts between a low and a
high value. Both values are stored before the counts.

Shuffles sort the bytes of `[n]` items of 1, 2, 4 or 8 bytes by their position in the item, so that
similar bytes are adjacent. Byte plane k consists of byte k of all items, the lowest byte first:

- `shuffle`: byte planes.
- `split`: the lower half of each number, then byte planes of the upper half. Intended for floats:
  the lower bits of their mantissas are noise that no packer shortens. `split` decodes 1.6 times as
  fast as `shuffle`.
- `bitshuffle`: bit planes. Bit plane k consists of bit k of all items.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import CorruptFileError, FieldTypeError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
IMAGE_LEVELS = 255
#: Largest error of rounding to 256 levels. Rounding to the dtype of the field adds 2^-9 for
#: bfloat16 and 2^-12 for float16.
IMAGE_MAX_ERROR = 0.5 / IMAGE_LEVELS
_COUNTS = 65535
#: Values that the three highest counts encode. In chunks of finite values, all counts are linear.
_SPECIAL = (-np.inf, np.inf, np.nan)
#: Layout of the bytes before the counts: low value, step, flag for special counts.
_RANGE = struct.Struct("<dd?")
RANGE_BYTES = _RANGE.size
#: Names of shuffles in chains.
SHUFFLES = ("shuffle", "split", "bitshuffle")
#: `bitshuffle` pads the items to a multiple of this number. Each eighth of a byte plane then
#: consists of whole 64-bit words.
_BITS_GROUP = 64
#: Masks of the bits that two eighths of a byte plane exchange in one step of `_transpose_bits`, by
#: the distance of the eighths.
_MASKS = {4: 0x0F0F0F0F0F0F0F0F, 2: 0x3333333333333333, 1: 0x5555555555555555}


def encode_image(values: torch.Tensor) -> torch.Tensor:
    """Convert floats in [0, 1] to uint8 counts of 1/255. uint8 values are returned unchanged."""
    if values.dtype == torch.uint8:
        return values
    if not values.dtype.is_floating_point:
        raise FieldTypeError(
            "codec 'normalized_image' needs floats in [0, 1] or uint8 counts of 1/255, got "
            f"{str(values.dtype).removeprefix('torch.')}."
        )
    # Rounding is unbiased with an error of at most 0.5/255; truncation has an error of 1/255 and a
    # bias. NaN becomes 0, like all values below the range.
    scaled = (
        torch.nan_to_num(values.to(torch.float32), nan=0.0)
        .clamp(0.0, 1.0)
        .mul_(float(IMAGE_LEVELS))
    )
    return scaled.round_().to(torch.uint8)


def decode_image(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert uint8 counts to `dtype`: counts / 255, or the counts themselves for uint8."""
    if dtype == torch.uint8:
        return stored
    values = stored.to(dtype)
    # A 0-d tensor, since CUDA replaces division by a Python number by multiplication with its
    # reciprocal, which differs in the last bit.
    levels = torch.full((), float(IMAGE_LEVELS), dtype=dtype, device=stored.device)
    return values.div_(levels)


def image_error(values: torch.Tensor) -> float:
    """Return the largest error after encoding `values` as an image.

    Returns inf if a value is NaN or infinite.
    """
    if values.dtype == torch.uint8 or not values.numel():
        return 0.0
    back = decode_image(encode_image(values), values.dtype)
    error = float((back.to(torch.float64) - values.to(torch.float64)).abs().max())
    return math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class LinearCounts:
    """Quantizer that encodes floats as uint16 counts between a low and a high value.

    Attributes:
        low, high: Range to which values are clipped; None uses the range of the values to encode.
    """

    low: float | None = None
    high: float | None = None

    def encode(self, values: Array) -> tuple[bytes, npt.NDArray[np.uint16], float]:
        """Encode n values; return (packed range, counts `[n]`, largest error of finite values).

        Decoding restores NaN and infinities.
        """
        with np.errstate(invalid="ignore"):  # The conversion of a signalling NaN would warn.
            wide: Array = values.reshape(-1).astype(np.float64)
        is_finite = np.isfinite(wide)
        is_special = not bool(is_finite.all())
        finite = wide[is_finite] if is_special else wide
        low = float(finite.min(initial=np.inf)) if self.low is None else self.low
        high = float(finite.max(initial=-np.inf)) if self.high is None else self.high
        # The range is empty because no value is finite.
        if low > high:
            low = 0.0
            high = 0.0
        levels = _COUNTS - (len(_SPECIAL) if is_special else 0)
        step = high / levels - low / levels
        with np.errstate(all="ignore"):
            nearest: Array = np.rint(wide / step - low / step) if step > 0 else np.zeros_like(wide)
        counts: npt.NDArray[np.uint16] = np.where(is_finite, np.clip(nearest, 0, levels), 0).astype(
            np.uint16
        )
        if is_special:
            for place, special in enumerate(_SPECIAL):
                has_value = np.isnan(wide) if np.isnan(special) else wide == special
                counts[has_value] = levels + 1 + place
        range_bytes = _RANGE.pack(low, step, is_special)
        decoded = np.empty(len(wide), values.dtype)
        decode_counts(range_bytes, counts, decoded)
        error = 0.0
        if len(wide):
            error = float(np.abs(decoded.astype(np.float64)[is_finite] - finite).max(initial=0.0))
        return range_bytes, counts, error


def decode_counts(range_bytes: bytes, counts: npt.NDArray[np.uint16], out: Array) -> None:
    """Decode `counts` into `out`, `[n]` floats. `counts` and `out` are contiguous.

    `range_bytes` is the packed range that `LinearCounts.encode` returned.

    Raises:
        CorruptFileError: The range is not finite.
    """
    low, step, is_special = _RANGE.unpack(range_bytes)
    if not (math.isfinite(low) and math.isfinite(step) and step >= 0):
        raise CorruptFileError(
            f"the range of the chunk is not finite: it starts at {low} with steps of {step}."
        )
    # Use float32 if the range allows. The measured error includes the rounding to float32.
    is_narrow = (
        out.dtype == np.float32 and abs(low) + step * _COUNTS < 1e37 and (step == 0 or step > 1e-37)
    )
    if is_narrow:
        np.multiply(counts, np.float32(step), out=out)
        np.add(out, np.float32(low), out=out)
    else:
        # Values that float16 cannot hold need no warning, since they make the measured error
        # infinite.
        with np.errstate(over="ignore"):
            out[:] = counts * step + low
    if is_special:
        first = _COUNTS - len(_SPECIAL) + 1
        for place, special in enumerate(_SPECIAL):
            out[counts == first + place] = special


# -- shuffles ----------------------------------------------------------------------------------


def shuffled_bytes(name: str, num_items: int, item_bytes: int) -> int:
    """Return the bytes of `num_items` shuffled items. Bit planes are padded to whole words."""
    if name == "bitshuffle":
        num_items = -(-num_items // _BITS_GROUP) * _BITS_GROUP
    return num_items * item_bytes


def scratch_bytes(num_bytes: int) -> int:
    """Return the bytes of scratch memory that `unshuffle` needs for `num_bytes` bytes.

    `unshuffle` splits items into halves recursively. Each level needs padded memory for the halves.
    """
    return 2 * num_bytes + 128


def shuffle(name: str, items: Array) -> Bytes:
    """Return the bytes of contiguous unsigned `items` in the order of a shuffle, as new memory."""
    size = items.dtype.itemsize
    if name == "bitshuffle":
        padded = np.zeros(shuffled_bytes(name, len(items), size) // size, items.dtype)
        padded[: len(items)] = items
        planes = np.ascontiguousarray(padded.view(np.uint8).reshape(-1, size).T)
        _transpose_bits(planes, np.empty(planes.size, np.uint8))
        return planes.reshape(-1)
    rows = items.view(np.uint8).reshape(-1, size)
    low = _low_bytes(name, size)
    parts = [np.ascontiguousarray(rows[:, :low]).reshape(-1)] if low else []
    return np.concatenate([*parts, *(rows[:, place] for place in range(low, size))])


def unshuffle(name: str, data: Bytes, out: Array, scratch: Bytes) -> None:
    """Undo `shuffle` into `out`, contiguous unsigned items.

    `scratch` has `scratch_bytes(len(data))` bytes.
    """
    size = out.dtype.itemsize
    if name == "bitshuffle":
        padded = len(data) // size
        data = data.copy()
        _transpose_bits(data.reshape(size, padded), scratch[: len(data)])
        _join([data[k * padded : k * padded + len(out)] for k in range(size)], out, scratch)
        return
    low = _low_bytes(name, size)
    count = len(out)
    planes = [data[k * count : (k + 1) * count] for k in range(low, size)]
    if not low:
        _join(planes, out, scratch)
        return
    upper, _, rest = _halves(out, scratch)
    _join(planes, upper, rest)
    _combine(upper, data[: count * low].view(upper.dtype), out)


def _low_bytes(name: str, size: int) -> int:
    """Return the size of the lower half of an item for `split`; 0 if all bytes are planes."""
    return size // 2 if name == "split" and size > 2 else 0


def _join(planes: list[Bytes], out: Array, scratch: Bytes) -> None:
    """Write to `out` the items that consist of byte planes, the lowest plane first.

    The halves of the items are joined recursively. This takes a third to a fifth of the time of
    copying each plane to every n-th byte.
    """
    if len(planes) == 1:
        np.copyto(out, planes[0])
        return
    if len(planes) == 2:
        _combine(planes[1], planes[0], out)
        return
    upper, lower, rest = _halves(out, scratch)
    middle = len(planes) // 2
    _join(planes[middle:], upper, rest)
    _join(planes[:middle], lower, rest)
    _combine(upper, lower, out)


def _halves(out: Array, scratch: Bytes) -> tuple[Array, Array, Bytes]:
    """Reserve scratch memory for the halves of the items of `out`.

    Returns memory for the upper halves, memory for the lower halves, and the remaining memory.
    """
    half = out.dtype.itemsize // 2
    size = len(out) * half
    first = -(-size // 8) * 8
    second = -(-size // 8) * 16
    return (
        scratch[:size].view(f"u{half}"),
        scratch[first : first + size].view(f"u{half}"),
        scratch[second:],
    )


def _combine(upper: Array, lower: Array, out: Array) -> None:
    """Write items to `out`, built from their upper and lower halves."""
    np.copyto(out, upper)
    np.left_shift(out, 8 * lower.dtype.itemsize, out=out)
    np.bitwise_or(out, lower, out=out)


def _transpose_bits(planes: Bytes, scratch: Bytes) -> None:
    """Convert byte planes to bit planes in place, or bit planes to byte planes.

    Each plane is divided into eighths, which are the rows of many 8 x 8 bit matrices: bit b of
    eighth k and bit k of eighth b change places. The matrices are transposed together, word by
    word (Warren, Hacker's Delight, 7-3). The transposition is its own inverse.
    """
    words = planes.reshape(len(planes), 8, -1).view(np.uint64)
    for distance, mask in _MASKS.items():
        pairs = words.reshape(len(planes), 4 // distance, 2, distance, -1)
        first = pairs[:, :, 0]
        second = pairs[:, :, 1]
        moved = scratch[: first.size * 8].view(np.uint64).reshape(first.shape)
        np.right_shift(first, distance, out=moved)
        np.bitwise_xor(moved, second, out=moved)
        np.bitwise_and(moved, np.uint64(mask), out=moved)
        np.bitwise_xor(second, moved, out=second)
        np.left_shift(moved, distance, out=moved)
        np.bitwise_xor(first, moved, out=first)
