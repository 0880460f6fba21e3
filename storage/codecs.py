"""Codecs: array <-> stored array, by name. Each states whether, and how much, it loses.

One rule: a codec is a pure pair of functions and knows nothing of files. The codecs here keep
one stored value per value (quantizers), so that coded rows stay fixed-size and random access
stays one gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import FieldTypeError, UsageError, nearest
from .fields import DTYPES, Field


@dataclass(frozen=True)
class Codec:
    """How the values of one field are stored.

    Attributes:
        name: The name in `obs_disassemble_mapping` and in files.
        is_lossless: True if decode(encode(x)) == x for every x that the codec accepts.
        max_error: Largest absolute error on accepted values; 0 if lossless.
        stored_dtype: Dtype name of the stored values; None keeps the field's own.
        encode: Tensor of the field's dtype -> tensor of the stored dtype.
        decode: Tensor of the stored dtype -> tensor of the field's dtype.
    """

    name: str
    is_lossless: bool
    max_error: float
    stored_dtype: str | None
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def _encode_normalized_image(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.uint8:
        return values
    if not values.dtype.is_floating_point:
        raise FieldTypeError(
            "code values as 'normalized_image'", "", "floats in [0, 1] or uint8 counts of 1/255", str(values.dtype)
        )
    # Rounding is unbiased with an error of at most 0.5/255; truncation would lose 1/255 and a bias.
    # NaN has no image value: 0, like everything below the range.
    scaled = torch.nan_to_num(values.to(torch.float32), nan=0.0).clamp(0.0, 1.0).mul_(255.0)
    return scaled.round_().to(torch.uint8)


def _decode_normalized_image(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored.to(dtype).div_(255.0)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", True, 0.0, None, lambda values: values, lambda stored, dtype: stored),
        Codec("normalized_image", False, 0.5 / 255.0, "uint8", _encode_normalized_image, _decode_normalized_image),
    )
}


def codec_of(field: Field) -> Codec:
    """Give the codec of a field; an unknown name raises `UsageError` listing the known ones."""
    try:
        return CODECS[field.codec]
    except KeyError:
        raise UsageError(
            "find the codec of field", repr(field.name), nearest(field.codec, CODECS), repr(field.codec)
        ) from None


def stored_field(field: Field) -> Field:
    """Describe the field as it is stored: the codec's dtype, no codec."""
    return Field(field.name, field.shape, codec_of(field).stored_dtype or field.dtype)


def check_codec(field: Field) -> None:
    """Raise if the codec does not exist or cannot give back the field's dtype."""
    codec = codec_of(field)
    if codec.stored_dtype is not None and not DTYPES[field.dtype][0].is_floating_point:
        raise FieldTypeError(f"code the field as {codec.name!r}", repr(field.name), "a floating dtype", field.dtype)
