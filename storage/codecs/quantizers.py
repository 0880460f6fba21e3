"""Quantizers: numbers as fewer bits, and how much that loses.

One rule: rounding is to the nearest, and the largest error that quantizing made is returned.
`normalized_image` keeps one uint8 per value and needs nothing besides; `uint16` is linear between a low
and a high value, which stand beside the counts.
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


def encode_image(values: torch.Tensor) -> torch.Tensor:
    """Turn floats in [0, 1] into uint8 counts of 1/255; uint8 is counts already and stays."""
    if values.dtype == torch.uint8:
        return values
    if not values.dtype.is_floating_point:
        raise FieldTypeError(
            "code values as 'normalized_image'", "", "floats in [0, 1] or uint8 counts of 1/255", str(values.dtype)
        )
    # Rounding is unbiased with an error of at most 0.5/255; truncation would lose 1/255 and a bias.
    # NaN has no image value: 0, like everything below the range.
    scaled = torch.nan_to_num(values.to(torch.float32), nan=0.0).clamp(0.0, 1.0).mul_(float(IMAGE_LEVELS))
    return scaled.round_().to(torch.uint8)


def decode_image(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn uint8 counts into `dtype`: counts / 255, or the counts themselves for uint8."""
    if dtype == torch.uint8:
        return stored
    return stored.to(dtype).div_(float(IMAGE_LEVELS))


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
        """Give the range, the counts `[n]` and the largest error of the finite values.

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
