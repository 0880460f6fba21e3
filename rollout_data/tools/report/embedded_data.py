"""Encode numbers and images as text in the page: base64 of 16-bit codes, and small JPEGs.

`page.js` decodes the result of `pack_rows`.
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
#: 16-bit code of NaN and infinite values. Finite values have codes from 0 (minimum) to 65534.
UNKNOWN = 65535
#: Longest side of an image on the page, in pixels.
PICTURE_PIXELS = 96
_JPEG_QUALITY = 60
#: Minimum side of a depth image, in pixels. A smaller 2-D array is not shown as an image.
_MIN_DEPTH_SIDE = 16
#: Pattern of the JSON escape of an invisible character, such as "\u200e" for a left-to-right mark.
#: It does not match if the text itself has a backslash before "u200e", which is "\\u200e" in JSON.
#: In that case, an odd number of backslashes precedes the backslash of the escape.
_INVISIBLE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\"
    r"(u00[01][0-9a-f]|u007f|u00[89][0-9a-f]|u061c|u200[ef]|u202[8-9a-e]|u206[0-9a-f]|ufeff)"
)


def compress(data: bytes) -> str:
    """Compress bytes with gzip and encode them in base64, without a time stamp."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def pack_rows(values: Array) -> dict[str, Any]:
    """Encode rows of numbers as 16-bit codes, compressed in base64, with the range of each row.

    The codes of a row divide the range from its minimum to its maximum into equal steps. The
    minimum and the maximum are rounded to 12 digits. `page.js` needs both to decode the row.

    Args:
        values: `[rows, planes, points]`. A row is a curve of `points` intervals. Its planes are the
            numbers of an interval, such as the minimum and the maximum.
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
    # Store all low bytes, then all high bytes. High bytes of successive codes are similar, so that
    # they compress well.
    by_significance = code_bytes.T

    _, planes, points = values.shape
    return {
        "points": points,
        "planes": planes,
        "low": digits(low, 12),
        "high": digits(high, 12),
        "data": compress(by_significance.tobytes()),
    }


def digits(values: Any, count: int = 5) -> Any:
    """Round numbers to `count` significant digits, and replace NaN and infinities by None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list):
        return [digits(value, count) for value in values]
    return float(f"{values:.{count}g}") if math.isfinite(values) else None


def as_json(content: Any) -> str:
    """Convert a value to JSON without "<", so that it can be embedded in a script element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def as_visible_json(content: Any) -> str:
    """Convert a value to JSON for a script element, with invisible characters made visible.

    A name with such a character could imitate another name. It is shown as a code, such as
    "\\u200e".
    """
    return _INVISIBLE.sub(r"\1\\\\\2", as_json(content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether a field with this shape is shown as images.

    Shapes of images are `[H, W, C]`, `[C, H, W]`, and `[H, W]` for depth.
    """
    return bool(axes_of(shape)) and (len(shape) == 3 or min(shape) >= _MIN_DEPTH_SIDE)


def to_rgb(rows: Array, low: float, high: float) -> Array:
    """Convert images to RGB, uint8 `[n, H, W, 3]`.

    Args:
        rows: Images `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]`. A fourth channel is ignored.
        low: Value that becomes black. It has no effect on uint8 images.
        high: Value that becomes white. It has no effect on uint8 images.
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
    """Convert an image to a small JPEG, as a data URL.

    Args:
        row: An image with a shape that `is_picture` accepts. Depth is scaled from its minimum and
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
    # Subsampling first makes the exact resizing by PIL faster.
    step = max(1, min(colours.shape[:2]) // (2 * PICTURE_PIXELS))
    image = image_module.fromarray(np.ascontiguousarray(colours[::step, ::step]))
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
