"""The stages before the packer: quantizers, which lose, and shuffles, which do not.

One rule: a pair of functions each. Quantizers keep numbers as fewer bits: rounding is to the nearest, and the largest
error that it made is returned. `normalized_image` keeps one uint8 per value and needs nothing besides; `uint16` is
linear between a low and a high value, which stand beside the counts.

Shuffles sort the bytes of `[n]` items of 1, 2, 4 or 8 bytes by their place within the number, so that like stands
beside like: `shuffle` (byte planes), `split` (the lower half of each number whole, its upper bytes in planes),
`bitshuffle` (bit planes). They take no new memory when undone except the scratch that is handed in. `split` is for
floats: the lower half of a mantissa is noise that no packer shortens, and taking it in one piece decodes 1.6 times as
fast as `shuffle`.
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
#: Rounding to the nearest of 256 levels. The rounding of the field's dtype comes on top: 2^-9 for bfloat16, 2^-12 for
#: float16.
IMAGE_MAX_ERROR = 0.5 / IMAGE_LEVELS
_COUNTS = 65535
#: With values that are not finite the three highest counts stand for -Inf, Inf and NaN.
_SPECIAL = (-np.inf, np.inf, np.nan)
#: What stands before the counts: low value, step, whether there are special counts.
_RANGE = struct.Struct("<dd?")
RANGE_BYTES = _RANGE.size
#: Every shuffle by its name in chains.
SHUFFLES = ("shuffle", "split", "bitshuffle")
#: Bit planes are built of 64-bit words, one of each of the eight parts of a byte plane.
_BITS_GROUP = 64
#: Distance -> the bits that two rows exchange in that step of the transposition.
_MASKS = {4: 0x0F0F0F0F0F0F0F0F, 2: 0x3333333333333333, 1: 0x5555555555555555}


def encode_image(values: torch.Tensor) -> torch.Tensor:
    """Turn floats in [0, 1] into uint8 counts of 1/255; uint8 is counts already and stays."""
    if values.dtype == torch.uint8:
        return values
    if not values.dtype.is_floating_point:
        expected = "floats in [0, 1] or uint8 counts of 1/255"
        raise FieldTypeError("code values as 'normalized_image'", "", expected, str(values.dtype))
    # Rounding is unbiased with an error of at most 0.5/255; truncation would lose 1/255 and a bias.
    # NaN has no image value: 0, like everything below the range.
    scaled = torch.nan_to_num(values.to(torch.float32), nan=0.0).clamp(0.0, 1.0).mul_(float(IMAGE_LEVELS))
    return scaled.round_().to(torch.uint8)


def decode_image(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn uint8 counts into `dtype`: counts / 255, or the counts themselves for uint8."""
    if dtype == torch.uint8:
        return stored
    values = stored.to(dtype)
    # CUDA multiplies by the reciprocal of a Python number, which differs in the last bit; a 0-d tensor divides.
    levels = torch.full((), float(IMAGE_LEVELS), dtype=dtype, device=stored.device)
    return values.div_(levels)


def image_error(values: torch.Tensor) -> float:
    """Largest error of the finite `values` when stored as an image; Inf if there is a NaN or Inf."""
    if values.dtype == torch.uint8 or not values.numel():
        return 0.0
    back = decode_image(encode_image(values), values.dtype)
    error = float((back.to(torch.float64) - values.to(torch.float64)).abs().max())
    return math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class LinearCounts:
    """Floats as uint16 counts between a low and a high value.

    Attributes:
        low, high: The range, beyond which values are cut; None takes the range of what is coded.
    """

    low: float | None = None
    high: float | None = None

    def encode(self, values: Array) -> tuple[bytes, npt.NDArray[np.uint16], float]:
        """Return the range, the counts `[n]` and the largest error of the finite values.

        NaN and infinities come back as they are.
        """
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            wide: Array = values.reshape(-1).astype(np.float64)
        is_finite = np.isfinite(wide)
        is_special = not bool(is_finite.all())
        finite = wide[is_finite] if is_special else wide
        low = float(finite.min(initial=np.inf)) if self.low is None else self.low
        high = float(finite.max(initial=-np.inf)) if self.high is None else self.high
        if low > high:  # nothing is finite
            low = high = 0.0
        levels = _COUNTS - (len(_SPECIAL) if is_special else 0)
        step = high / levels - low / levels
        with np.errstate(all="ignore"):
            nearest: Array = np.rint(wide / step - low / step) if step > 0 else np.zeros_like(wide)
        counts: npt.NDArray[np.uint16] = np.where(is_finite, np.clip(nearest, 0, levels), 0).astype(np.uint16)
        for place, special in enumerate(_SPECIAL if is_special else ()):
            is_it = np.isnan(wide) if np.isnan(special) else wide == special
            counts[is_it] = levels + 1 + place
        about = _RANGE.pack(low, step, is_special)
        back = np.empty(len(wide), values.dtype)
        decode_counts(about, counts, back)
        error = np.abs(back.astype(np.float64)[is_finite] - finite).max(initial=0.0) if len(wide) else 0.0
        return about, counts, float(error)


def decode_counts(about: bytes, counts: npt.NDArray[np.uint16], out: Array) -> None:
    """Undo `LinearCounts.encode` into `out`, `[n]` floats; both arrays contiguous."""
    low, step, is_special = _RANGE.unpack(about)
    if not (math.isfinite(low) and math.isfinite(step) and step >= 0):
        raise CorruptFileError("decode a chunk", "", "a finite range of values", f"{low} in steps of {step}")
    # In the dtype itself where its range allows: an error of a few units in the last place, measured as well.
    is_narrow = out.dtype == np.float32 and abs(low) + step * _COUNTS < 1e37 and (step == 0 or step > 1e-37)
    if is_narrow:
        np.multiply(counts, np.float32(step), out=out)
        np.add(out, np.float32(low), out=out)
    else:
        with np.errstate(over="ignore"):  # a range that float16 cannot hold is in the measured error
            out[:] = counts * step + low
    if is_special:
        first = _COUNTS - len(_SPECIAL) + 1
        for place, special in enumerate(_SPECIAL):
            out[counts == first + place] = special


# -- shuffles ----------------------------------------------------------------------------------


def shuffled_bytes(name: str, num_items: int, item_bytes: int) -> int:
    """How many bytes `num_items` items have when shuffled: bit planes are padded to whole words."""
    if name == "bitshuffle":
        num_items = -(-num_items // _BITS_GROUP) * _BITS_GROUP
    return num_items * item_bytes


def scratch_bytes(num_bytes: int) -> int:
    """How much scratch undoing a shuffle of `num_bytes` takes: halves of halves, each padded to a word."""
    return 2 * num_bytes + 128


def shuffle(name: str, items: Array) -> Bytes:
    """Return the bytes of contiguous unsigned `items` in the order of this shuffle; new memory."""
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
    """Undo `shuffle` into `out`, contiguous unsigned items, with `scratch_bytes(len(data))` bytes of scratch."""
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
    return size // 2 if name == "split" and size > 2 else 0


def _join(planes: list[Bytes], out: Array, scratch: Bytes) -> None:
    """Put byte planes, the lowest first, together: by shifts, 3 to 5 times as fast as strided copies."""
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
    """Scratch for the upper and the lower half of each item, and what is left."""
    half = out.dtype.itemsize // 2
    size = len(out) * half
    first = -(-size // 8) * 8
    second = -(-size // 8) * 16
    return scratch[:size].view(f"u{half}"), scratch[first : first + size].view(f"u{half}"), scratch[second:]


def _combine(upper: Array, lower: Array, out: Array) -> None:
    np.copyto(out, upper)
    np.left_shift(out, 8 * lower.dtype.itemsize, out=out)
    np.bitwise_or(out, lower, out=out)


def _transpose_bits(planes: Bytes, scratch: Bytes) -> None:
    """Exchange, in place, bit b of part k and bit k of part b, of the eight parts of each row; its own inverse.

    The 8 x 8 transposition by exchanges of halves (Warren, Hacker's Delight, 7-3), on all words at once.
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
