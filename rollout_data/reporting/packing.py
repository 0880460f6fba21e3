"""Numbers and pictures as texts that the page unpacks: 16 bits per number, compressed, in base64; small JPEGs.

One rule: nothing here depends on what is drawn. The script of the page holds the other half of `packed`.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
from typing import Any

import numpy as np

from ..foreign.guards import optional

Array = np.ndarray[Any, Any]
#: The code of a value that is not finite; others are 0 to 65534, from the least of a row to its greatest.
UNKNOWN = 65535
PICTURE_PIXELS, _JPEG_QUALITY = 96, 60


def compressed(data: bytes) -> str:
    """Compress bytes into base64; equal bytes give equal texts."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def packed(values: Array) -> dict[str, Any]:
    """Pack rows of numbers.

    Args:
        values: `[rows, ...]`; the least and the greatest finite value of each row keep all their digits.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    finite = np.isfinite(rows)
    low = np.where(finite, rows, np.inf).min(1, initial=np.inf)
    high = np.where(finite, rows, -np.inf).max(1, initial=-np.inf)
    low, high = np.where(low > high, 0, low), np.where(low > high, 0, high)
    with np.errstate(over="ignore", invalid="ignore"):
        shares = (rows / 2 - low[:, None] / 2) / np.where(high > low, high / 2 - low / 2, 1)[:, None]
    codes = np.where(finite, np.round(np.nan_to_num(shares) * (UNKNOWN - 1)), UNKNOWN).astype("<u2", order="C")
    halves = codes.view(np.uint8).reshape(-1, 2).T  # the high bytes of a curve are alike, and compress well
    return {
        "low": digits(low, 12),
        "high": digits(high, 12),
        "data": compressed(np.ascontiguousarray(halves).tobytes()),
    }


def digits(values: Any, count: int = 5) -> Any:
    """Give numbers with `count` digits; None for what is not finite."""
    if isinstance(values, (np.ndarray, list)):
        return [digits(value, count) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]
    return float(f"{values:.{count}g}") if math.isfinite(values) else None


def as_json(content: Any) -> str:
    """Write JSON that may stand in a script element: there is no "<" in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def is_picture(shape: tuple[int, ...]) -> bool:
    """True for rows of a field that are drawn as pictures: `[H, W, C]`, `[C, H, W]`, or `[H, W]` of depth."""
    if len(shape) == 3:
        return (shape[2] in (1, 3, 4) and min(shape[:2]) >= 8) or (shape[0] in (1, 3, 4) and min(shape[1:]) >= 8)
    return len(shape) == 2 and min(shape) >= 16


def picture(pixels: Array) -> str:
    """Make a small JPEG of a picture, as a data URL.

    Args:
        pixels: As `is_picture` says. Depth is stretched from its least to its greatest value, colours that are not
            uint8 from 0 to 1.
    """
    image_module = optional("PIL.Image", "pillow", "report", "pictures for the page")
    shown = pixels[..., None] if pixels.ndim == 2 else pixels
    shown = shown if shown.shape[2] in (1, 3, 4) else np.moveaxis(shown, 0, 2)
    if shown.dtype != np.uint8:
        values = np.nan_to_num(shown.astype(np.float64))
        low, high = (values.min(), values.max()) if shown.shape[2] == 1 else (0.0, 255.0 if values.max() > 1.5 else 1.0)
        shown = np.clip((values - low) / ((high - low) or 1) * 255, 0, 255)
    step = max(1, min(shown.shape[:2]) // (2 * PICTURE_PIXELS))  # the quick part of making it small
    shown = np.ascontiguousarray(shown[::step, ::step]).astype(np.uint8)
    image = image_module.fromarray(shown[..., 0] if shown.shape[2] == 1 else shown[..., :3])
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
