"""Numbers and pictures as texts that the page unpacks: 16 bits per number, compressed, in base64; small JPEGs.

One rule: nothing here depends on what is drawn. The script of the page holds the other half of `packed`.
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
#: Larger numbers are drawn as this one: the differences of charts would not be finite.
LARGEST = 1e300
#: The code of a value that is not finite; others are 0 to 65534, from the least of a row to its greatest.
UNKNOWN = 65535
PICTURE_PIXELS = 96
_JPEG_QUALITY = 60
_MIN_DEPTH_SIDE = 16
#: In JSON: control characters, marks of direction, and what separates lines, after an even number of backslashes.
_UNSEEN = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(u00[01][0-9a-f]|u007f|u00[89][0-9a-f]|u061c|u200[ef]|u202[8-9a-e]|u206[0-9a-f]|ufeff)"
)


def compressed(data: bytes) -> str:
    """Compress bytes into base64; equal bytes give equal texts."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def packed(values: Array) -> dict[str, Any]:
    """Pack rows of numbers.

    Args:
        values: `[rows, planes, points]`; the least and the greatest finite value of each row keep all their digits.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    finite = np.isfinite(rows)
    rows = np.clip(rows, -LARGEST, LARGEST)
    low = np.where(finite, rows, np.inf).min(1, initial=np.inf)
    high = np.where(finite, rows, -np.inf).max(1, initial=-np.inf)
    low, high = np.where(low > high, 0, low), np.where(low > high, 0, high)
    shares = (rows - low[:, None]) / np.where(high > low, high - low, 1)[:, None]
    codes = np.where(finite, np.round(np.nan_to_num(shares) * (UNKNOWN - 1)), UNKNOWN).astype("<u2", order="C")
    halves = codes.view(np.uint8).reshape(-1, 2).T  # the high bytes of a curve are alike, and compress well
    _, planes, points = values.shape
    ends = {"low": digits(low, 12), "high": digits(high, 12)}
    return {"points": points, "planes": planes, **ends, "data": compressed(halves.tobytes())}


def digits(values: Any, count: int = 5) -> Any:
    """Return numbers with `count` digits; None for what is not finite."""
    if isinstance(values, (np.ndarray, list)):
        return [digits(value, count) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]
    return float(f"{values:.{count}g}") if math.isfinite(values) else None


def as_json(content: Any) -> str:
    """Write JSON that may stand in a script element: there is no "<" in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def as_visible_json(content: Any) -> str:
    """Write JSON where letters that cannot be seen, or that reverse others, are shown by their codes."""
    return _UNSEEN.sub(r"\1\\\\\2", as_json(content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """True for rows of a field that are drawn as pictures: `[H, W, C]`, `[C, H, W]`, or `[H, W]` of depth."""
    return bool(axes_of(shape)) and (len(shape) == 3 or min(shape) >= _MIN_DEPTH_SIDE)


def pixels(rows: Array, low: float, high: float) -> Array:
    """Return pictures as `[n, H, W, 3]` uint8.

    Args:
        rows: `[n, *shape]`, with axes that `axes_of` knows; of four channels the last one is left out.
        low, high: What becomes black and white, where they are not uint8.
    """
    if rows.dtype != np.uint8:
        rows = np.nan_to_num((rows - low) * (255.0 / max(high - low, 1e-30))).clip(0, 255).astype(np.uint8)
    axes = axes_of(rows.shape[1:])
    rows = rows[..., None] if axes == "HW" else np.moveaxis(rows, 1, -1) if axes == "CHW" else rows
    return np.ascontiguousarray(np.repeat(rows, 3, -1) if rows.shape[-1] == 1 else rows[..., :3])


def picture(row: Array) -> str:
    """Make a small JPEG of a picture, as a data URL.

    Args:
        row: As `is_picture` says. Depth is stretched from its least to its greatest value, colours that are not uint8
            from 0 to 1 or 255.
    """
    image_module = optional("PIL.Image", "pillow", "report", "pictures for the page")
    finite = row[np.isfinite(row)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    if row.ndim == 3 and 1 not in (row.shape[0], row.shape[2]):
        low = 0.0
        high = 255.0 if high > 1.5 else 1.0
    shown = pixels(row[None], float(low), float(high))[0]
    step = max(1, min(shown.shape[:2]) // (2 * PICTURE_PIXELS))  # the quick part of making it small
    image = image_module.fromarray(np.ascontiguousarray(shown[::step, ::step]))
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
