"""Read and write encoded pictures with pillow: PNG, JPEG, and uncompressed TIFF for depth maps.

The size in the header is compared with the expected shape before pixels are decoded, so that a
damaged header cannot fill the memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from storage.errors import CorruptFileError

from .input_checks import damage_named, of_kind, optional

#: Maximum number of pixels of a picture: 8192 x 8192, or 192 MiB of RGB.
MAX_PIXELS = 1 << 26
_FORMATS = ("PNG", "JPEG", "TIFF")
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
#: Maps each mode of pillow with more than 8 bits per channel to the dtype of the pixels.
_DEEP_MODES = {"I;16": "uint16", "I;16B": "uint16", "I;16L": "uint16", "F": "float32"}
_COMPRESSION_TAG = 259
_UNCOMPRESSED = 1
#: Exceptions that pillow raises for damaged pictures.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
)
Pixels = np.ndarray[Any, Any]
#: Minimum number of pixels of the shorter side. Arrays with a shorter side are not pictures.
_MIN_SIDE = 8
_NUM_CHANNELS = (1, 3, 4)


def axes_of(shape: Sequence[int]) -> str:
    """Return the order of the axes if an array of this shape may be a picture.

    Returns:
        "HW", "HWC" or "CHW"; "" if no picture has this shape.
    """
    if len(shape) == 2:
        axes = "HW"
    elif len(shape) == 3:
        axes = "HWC" if shape[2] in _NUM_CHANNELS else "CHW"
    else:
        return ""
    sides = dict(zip(axes, shape, strict=True))
    is_large = min(sides["H"], sides["W"]) >= _MIN_SIDE
    return axes if is_large and sides.get("C", 1) in _NUM_CHANNELS else ""


def picture_format(data: bytes | memoryview) -> str:
    """Detect the format from the first bytes: "PNG", "JPEG" or "TIFF"; "" for other data."""
    head = bytes(data[:8])
    if head == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if head[:3] == b"\xff\xd8\xff":
        return "JPEG"
    return "TIFF" if head[:4] in (b"II*\0", b"MM\0*") else ""


@of_kind("undecodable")
def decode_picture(
    data: bytes | memoryview, where: str, shape: tuple[int, ...] | None = None
) -> Pixels:
    """Decode a picture.

    Args:
        data: The encoded picture.
        where: Field and frame of the picture, for errors.
        shape: Expected shape, `[H, W, C]`, or `[H, W]` for depth; None accepts every shape. A grey
            picture is converted to RGB if the shape has three channels.

    Returns:
        A new array: `[H, W, C]` uint8 with C of 1, 3 or 4. A picture with more than 8 bits per
        channel, such as a depth map, is `[H, W]` uint16 or float32.

    Raises:
        CorruptFileError: The picture is damaged, has another shape or format, or more than
            `MAX_PIXELS` pixels.
        UsageError: Pillow is missing.
    """
    if picture_format(data) == "PNG" and b"IEND" not in bytes(data[-1024:]):
        raise CorruptFileError(f"{where} contains a truncated PNG.")
    with _opened(data, where, shape) as image:
        if image.mode in _DEEP_MODES:
            pixels: Pixels = np.array(image).astype(_DEEP_MODES[image.mode])
        else:
            has_three_channels = shape is not None and shape[2:] == (3,)
            mode = image.mode if image.mode in _CHANNELS else "RGB"
            if has_three_channels and mode == "L":
                mode = "RGB"
            pixels = np.array(image if mode == image.mode else image.convert(mode))
            pixels = pixels.reshape(*pixels.shape[:2], _CHANNELS[mode])
    if shape is not None and pixels.shape != shape:
        raise _wrong_picture(where, f"shape {pixels.shape}", f"shape {shape}")
    return pixels


@of_kind("undecodable")
def picture_shape(data: bytes | memoryview, where: str) -> tuple[int, ...]:
    """Read the shape `[H, W, C]` of a picture from its header, without decoding the picture.

    Raises:
        CorruptFileError: The picture is damaged, or has more than 8 bits per channel.
        UsageError: Pillow is missing.
    """
    with _opened(data, where, None) as image:
        if image.mode in _DEEP_MODES:
            raise _wrong_picture(where, f"mode {image.mode}", "8 bits per channel")
        width, height = image.size
        return height, width, _CHANNELS.get(image.mode, 3)


@contextmanager
def _opened(data: bytes | memoryview, where: str, shape: tuple[int, ...] | None) -> Iterator[Any]:
    """Open a picture with pillow, after checks of its header.

    Errors raised in the block become `CorruptFileError`.
    """
    image_module = optional("PIL.Image", "pillow", "formats", "pictures")
    if not picture_format(data):
        raise CorruptFileError(
            f"{where} contains data that start with {bytes(data[:8])!r}, expected a picture as "
            "PNG, JPEG or TIFF."
        )
    damage = (*_DAMAGE, image_module.DecompressionBombError)
    opening = damage_named(where, *damage)
    with opening, image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        if shape is not None and (height, width) != shape[:2]:
            expected = f"{shape[0]} x {shape[1]}"
            raise _wrong_picture(where, f"{height} x {width} pixels", expected)
        if width * height > MAX_PIXELS:
            raise _wrong_picture(where, f"{height} x {width} pixels", f"at most {MAX_PIXELS}")
        if image.format == "TIFF":
            compression = image.tag_v2.get(_COMPRESSION_TAG, _UNCOMPRESSED)
            if compression != _UNCOMPRESSED:
                raise CorruptFileError(
                    f"{where} contains a compressed TIFF. Only uncompressed TIFF is read."
                )
        yield image


def _wrong_picture(where: str, content: str, expected: str) -> CorruptFileError:
    return CorruptFileError(f"{where} contains a picture with {content}, expected {expected}.")


def encode_picture(pixels: Pixels) -> bytes:
    """Encode a picture losslessly.

    Args:
        pixels: `[H, W, C]` uint8 with C of 1, 3 or 4, encoded as PNG, or `[H, W]` uint16 or
            float32, encoded as uncompressed TIFF.
    """
    image_module = optional("PIL.Image", "pillow", "formats", "pictures")
    file = io.BytesIO()
    if pixels.ndim == 3:
        flat = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        image_module.fromarray(np.ascontiguousarray(flat)).save(file, "PNG", compress_level=1)
    else:
        image_module.fromarray(np.ascontiguousarray(pixels)).save(file, "TIFF", compression=None)
    return file.getvalue()
