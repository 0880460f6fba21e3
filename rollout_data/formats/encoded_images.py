"""Encoded pictures: PNG, JPEG, and the uncompressed TIFF of depth maps, through pillow.

One rule: the header is compared with what is expected before a pixel is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from storage.errors import CorruptFileError

from .input_checks import damage_named, of_kind, optional

#: 8192 x 8192: 192 MiB of RGB.
MAX_PIXELS = 1 << 26
_FORMATS = ("PNG", "JPEG", "TIFF")
_ACTION = "decode the picture"
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
#: Modes of pillow with more than 8 bits -> what is delivered.
_DEEP = {"I;16": "uint16", "I;16B": "uint16", "I;16L": "uint16", "F": "float32"}
_COMPRESSION_TAG = 259
_UNCOMPRESSED = 1
#: What damage makes pillow raise; its errors of the system are `OSError`, and of values `ValueError`.
_DAMAGE = (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, AttributeError)
Pixels = np.ndarray[Any, Any]
#: What an array that holds pictures has.
_MIN_SIDE, _NUM_CHANNELS = 8, (1, 3, 4)


def axes_of(shape: Sequence[int]) -> str:
    """Name the axes of pictures: "HW", "HWC" or "CHW"; "" if these are none."""
    axes = "HW" if len(shape) == 2 else "HWC" if shape[-1:] and shape[-1] in _NUM_CHANNELS else "CHW"
    sides = dict(zip(axes, shape, strict=False))
    fits = len(shape) == len(axes) and min(sides["H"], sides["W"]) >= _MIN_SIDE and sides.get("C", 1) in _NUM_CHANNELS
    return axes if fits else ""


def picture_format(data: bytes | memoryview) -> str:
    """Return "PNG", "JPEG" or "TIFF" by the first bytes; "" for others."""
    head = bytes(data[:8])
    if head == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if head[:3] == b"\xff\xd8\xff":
        return "JPEG"
    return "TIFF" if head[:4] in (b"II*\0", b"MM\0*") else ""


@of_kind("undecodable")
def decode_picture(data: bytes | memoryview, where: str, shape: tuple[int, ...] | None = None) -> Pixels:
    """Decode a picture.

    Args:
        data: The encoded picture.
        where: Of which field and frame, for errors.
        shape: What must come out, `[H, W, C]` or, for depth, `[H, W]`; None for whatever the picture is. Shades of
            grey become RGB where three channels are asked for.

    Returns:
        `[H, W, C]` uint8 with C of 1, 3 or 4; `[H, W]` uint16 or float32 where the picture holds such numbers. A new
        array.

    Raises:
        CorruptFileError: It is damaged, of another kind or size, or larger than `MAX_PIXELS`.
        UsageError: Pillow is missing.
    """
    if picture_format(data) == "PNG" and b"IEND" not in bytes(data[-1024:]):
        raise _bad(where, "an intact picture", "a PNG that breaks off")
    with _opened(data, where, shape) as image:
        if image.mode in _DEEP:
            found: Pixels = np.array(image).astype(_DEEP[image.mode])
        else:
            wanted = shape[2] if shape is not None and len(shape) == 3 else None
            mode = image.mode if image.mode in _CHANNELS else "RGB"
            mode = "RGB" if wanted == 3 and mode == "L" else mode
            found = np.array(image if mode == image.mode else image.convert(mode))
            found = found.reshape(*found.shape[:2], _CHANNELS[mode])
    if shape is not None and found.shape != shape:
        raise _bad(where, f"the shape {shape}", str(found.shape))
    return found


@of_kind("undecodable")
def picture_shape(data: bytes | memoryview, where: str) -> tuple[int, ...]:
    """Return the shape that `decode_picture` gives, from the header alone; deep pictures are refused.

    Raises:
        CorruptFileError: It is damaged, or no picture of 8 bits.
        UsageError: Pillow is missing.
    """
    with _opened(data, where, None) as image:
        if image.mode in _DEEP:
            raise _bad(where, "8 bits per channel", image.mode)
        return image.size[1], image.size[0], _CHANNELS.get(image.mode, 3)


@contextmanager
def _opened(data: bytes | memoryview, where: str, shape: tuple[int, ...] | None) -> Iterator[Any]:
    """Return pillow's picture, of which only the header was read and checked; errors of reading it are named."""
    image_module = optional("PIL.Image", "pillow", "formats", "pictures")
    if not picture_format(data):
        raise _bad(where, "PNG, JPEG or TIFF", f"bytes {bytes(data[:8])!r}")
    damage = (*_DAMAGE, image_module.DecompressionBombError)
    opening = damage_named(_ACTION, where, "an intact picture", *damage)
    with opening, image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        if shape is not None and (height, width) != shape[:2]:
            raise _bad(where, f"{shape[0]} x {shape[1]} pixels", f"{height} x {width}")
        if width * height > MAX_PIXELS:
            raise _bad(where, f"at most {MAX_PIXELS} pixels", f"{height} x {width}")
        if image.format == "TIFF" and image.tag_v2.get(_COMPRESSION_TAG, _UNCOMPRESSED) != _UNCOMPRESSED:
            raise _bad(where, "an uncompressed TIFF", "a compressed one")
        yield image


def _bad(where: str, expected: str, got: str) -> CorruptFileError:
    return CorruptFileError(_ACTION, where, expected, got)


def encode_picture(pixels: Pixels) -> bytes:
    """Encode a picture without loss.

    Args:
        pixels: `[H, W, C]` uint8 with C of 1, 3 or 4, which becomes a PNG, or `[H, W]` uint16 or float32, which becomes
            an uncompressed TIFF.
    """
    image_module = optional("PIL.Image", "pillow", "formats", "pictures")
    out = io.BytesIO()
    if pixels.ndim == 3:
        flat = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        image_module.fromarray(np.ascontiguousarray(flat)).save(out, "PNG", compress_level=1)
    else:
        image_module.fromarray(np.ascontiguousarray(pixels)).save(out, "TIFF", compression=None)
    return out.getvalue()
