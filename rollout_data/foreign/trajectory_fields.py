"""The fields of a dataset of trajectory folders: from the arrays of its chunks and its metadata.

One rule: the chunks say what is there (keys, widths, dtypes), the metadata what it means
(order and shape of the observation's components, their codecs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from storage.codecs.codecs import VALUE_CODECS
from storage.core.fields import Field, Schema
from storage.errors import DataFileError, ForeignFileError, nearest

from .trajectory_chunks import ACTIONS, COMPONENT_PREFIX, OBSERVATIONS, PRIVILEGED, REWARDS, Chunk, Signature
from .trajectory_listing import MAPPING, SEGMENTS

_FIELD_OF_KEY = {
    OBSERVATIONS: "observation",
    PRIVILEGED: "privileged_observation",
    ACTIONS: "action",
    REWARDS: "reward",
}
_KEY_OF_FIELD = {name: key for key, name in _FIELD_OF_KEY.items()}
_COMPONENT = "observation/"


def key_of(field_name: str) -> str:
    """Give the key of a field in the chunks."""
    if field_name.startswith(_COMPONENT):
        return COMPONENT_PREFIX + field_name.removeprefix(_COMPONENT)
    return _KEY_OF_FIELD[field_name]


def most_common_signature(chunks: Iterable[Chunk]) -> Signature:
    """Give the arrays that most frames have, so that one odd chunk cannot rule out all others; () without chunks."""
    frames: Counter[Signature] = Counter()
    for chunk in chunks:
        frames[chunk.signature] += chunk.num_frames
    return max(frames, key=lambda signature: frames[signature], default=())


def difference(expected: Signature, got: Signature) -> tuple[str, str]:
    """Say in words where two signatures differ first: (expected, got)."""
    mine, theirs = ({field.key: field for field in signature} for signature in (expected, got))
    for key in {**mine, **theirs}:
        if mine.get(key) != theirs.get(key):
            return str(mine.get(key, f"no {key}")), str(theirs.get(key, f"no {key}"))
    return f"the order {', '.join(mine)}", ", ".join(theirs)


def build_schema(
    signature: Signature, metadata: Mapping[str, Any], metadata_path: Path
) -> tuple[Schema, list[DataFileError]]:
    """Declare the fields as users see them; say where metadata and chunks contradict each other (the chunks rule).

    Raises:
        ForeignFileError: A component that was recorded is coded in an unknown way.
    """
    problems: list[DataFileError] = []

    def report(expected: str, got: str, advice: str = "The chunks rule") -> None:
        problems.append(DataFileError("use the metadata", repr(str(metadata_path)), expected, got, advice))

    segments: Any = metadata.get(SEGMENTS)
    mapping: Any = metadata.get(MAPPING)
    if segments is not None and not _are_shapes(segments):
        advice = "Read without them: the components stand in the order of the chunks"
        report(f"{SEGMENTS} as an object of name -> shape", "something else", advice)
    segments = segments if _are_shapes(segments) else {}
    mapping = mapping if isinstance(mapping, dict) else {}
    rank = {COMPONENT_PREFIX + name: position for position, name in enumerate(segments)}
    components = [stored for stored in signature if stored.key not in _FIELD_OF_KEY]
    fields = []
    for stored in sorted(components, key=lambda stored: rank.get(stored.key, len(rank))):
        name = stored.key.removeprefix(COMPONENT_PREFIX)
        shape = tuple(segments.get(name, stored.shape))
        if segments and (name not in segments or prod(shape) != prod(stored.shape)):
            report(f"{SEGMENTS} as in the chunks", f"{name!r} of {prod(stored.shape)} values in the chunks")
            shape = stored.shape
        codec = mapping.get(name, "raw")
        if not isinstance(codec, str) or codec not in VALUE_CODECS:
            action, known = f"decode the component {name!r} of", nearest(str(codec), VALUE_CODECS)
            raise ForeignFileError(action, repr(str(metadata_path)), known, repr(codec))
        if codec == "raw" and not segments and stored.dtype == "uint8":
            codec, advice = "normalized_image", "Taken as 'normalized_image', the only codec of this layout"
            report(f"{MAPPING} for the uint8 {stored.key}", "none", advice)
        elif codec != "raw" and stored.dtype != (needed := VALUE_CODECS[codec].stored_dtype):
            expected = f"{needed} in {stored.key}, coded as {codec!r}"
            report(expected, f"{stored.dtype} in the chunks", "Read as it is, without decoding")
            codec = "raw"
        fields.append(Field(_COMPONENT + name, shape, stored.dtype if codec == "raw" else "float32", codec))
    missing = [key for key in rank if key not in {stored.key for stored in components}]
    if components and missing:
        report(f"{SEGMENTS} as in the chunks", f"no {missing[0]} in them")
    fields += [Field(_FIELD_OF_KEY[s.key], s.shape, s.dtype) for s in signature if s.key in _FIELD_OF_KEY]
    return Schema(fields), problems


def _are_shapes(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(shape, list) for shape in value.values()):
        return False
    return all(type(size) is int and size > 0 for shape in value.values() for size in shape)
