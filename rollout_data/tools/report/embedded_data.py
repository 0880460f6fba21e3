"""Numbers and pictures as text in the page: 16-bit codes compressed in base64, and small JPEGs.

`page.js` unpacks the result of `pack_rows`.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
from typing import Any

import numpy as np

from ...formats.encoded_images import axes_of
from ...formats.input_checks import optional

Array = np.ndarray[Any, Any]
#: Largest number in charts. Larger numbers are clipped, because their differences may overflow.
LARGEST = 1e300
#: Code of NaN and infinite values. Finite values have codes from 0 (minimum) to 65534 (maximum).
UNKNOWN = 65535
#: Longest side of a picture, in pixels.
PICTURE_PIXELS = 96
_JPEG_QUALITY = 60
#: Minimum side of a depth picture, in pixels. A smaller array is a field of numbers.
_MIN_DEPTH_SIDE = 16
#: JSON escapes of control, direction and line separator characters. An even number of backslashes
#: precedes an escape that is not itself escaped.
_INVISIBLE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\"
    r"(u00[01][0-9a-f]|u007f|u00[89][0-9a-f]|u061c|u200[ef]|u202[8-9a-e]|u206[0-9a-f]|ufeff)"
)


def compress(data: bytes) -> str:
    """Return bytes compressed in base64; equal bytes become equal texts."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def pack_rows(values: Array) -> dict[str, Any]:
    """Return rows of numbers as 16-bit codes, compressed in base64.

    Args:
        values: `[rows, planes, points]`. The finite minimum and maximum of each row keep 12 digits.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    finite = np.isfinite(rows)
    rows = np.clip(rows, -LARGEST, LARGEST)

    low = np.where(finite, rows, np.inf).min(1, initial=np.inf)
    high = np.where(finite, rows, -np.inf).max(1, initial=-np.inf)
    is_unknown = low > high
    low = np.where(is_unknown, 0, low)
    high = np.where(is_unknown, 0, high)

    ranges = np.where(high > low, high - low, 1)
    shares = np.nan_to_num((rows - low[:, None]) / ranges[:, None])
    codes = np.where(finite, np.round(shares * (UNKNOWN - 1)), UNKNOWN)
    code_bytes = codes.astype("<u2", order="C").view(np.uint8).reshape(-1, 2)
    by_significance = code_bytes.T  # Similar high bytes side by side compress well.

    _, planes, points = values.shape
    return {
        "points": points,
        "planes": planes,
        "low": digits(low, 12),
        "high": digits(high, 12),
        "data": compress(by_significance.tobytes()),
    }


def digits(values: Any, count: int = 5) -> Any:
    """Return numbers rounded to `count` digits; None replaces NaN and infinities."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list):
        return [digits(value, count) for value in values]
    return float(f"{values:.{count}g}") if math.isfinite(values) else None


def as_json(content: Any) -> str:
    """Return JSON without "<", so that it can be embedded in a script element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def as_visible_json(content: Any) -> str:
    """Return JSON that shows invisible and direction-changing characters as their codes."""
    return _INVISIBLE.sub(r"\1\\\\\2", as_json(content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether rows of this shape are drawn as pictures.

    Shapes of pictures are `[H, W, C]` and `[C, H, W]`, and `[H, W]` for depth.
    """
    return bool(axes_of(shape)) and (len(shape) == 3 or min(shape) >= _MIN_DEPTH_SIDE)


def to_rgb(rows: Array, low: float, high: float) -> Array:
    """Return pictures as `[n, H, W, 3]` uint8.

    Args:
        rows: Pictures `[n, *shape]` in an axis order of `axes_of`. A fourth channel is left out.
        low: Value that becomes black, unless `rows` are uint8.
        high: Value that becomes white, unless `rows` are uint8.
    """
    if rows.dtype != np.uint8:
        scale = 255.0 / max(high - low, 1e-30)
        rows = np.nan_to_num((rows - low) * scale).clip(0, 255).astype(np.uint8)
    axes = axes_of(rows.shape[1:])
    if axes == "HW":
        rows = rows[..., None]
    elif axes == "CHW":
        rows = np.moveaxis(rows, 1, -1)
    if rows.shape[-1] == 1:
        rows = np.repeat(rows, 3, -1)
    return np.ascontiguousarray(rows[..., :3])


def thumbnail(row: Array) -> str:
    """Return a small JPEG of a picture, as a data URL.

    Args:
        row: A picture with a shape that `is_picture` accepts. Depth is scaled from its minimum and
            maximum. Colours of other dtypes than uint8 are scaled from [0, 1] or [0, 255].
    """
    image_module = optional("PIL.Image", "pillow", "report", "pictures for the page")
    low = 0.0
    high = 1.0
    finite = row[np.isfinite(row)]
    if finite.size:
        low = float(finite.min())
        high = float(finite.max())
    has_colours = row.ndim == 3 and 1 not in (row.shape[0], row.shape[2])
    if has_colours:
        low = 0.0
        high = 255.0 if high > 1.5 else 1.0

    colours = to_rgb(row[None], low, high)[0]
    # Subsampling the pixels makes the exact resizing faster.
    step = max(1, min(colours.shape[:2]) // (2 * PICTURE_PIXELS))
    image = image_module.fromarray(np.ascontiguousarray(colours[::step, ::step]))
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
