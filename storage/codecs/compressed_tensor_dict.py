"""`CompressedTensorDict`: nested record of LZ4-compressed tensors, and a collector of records.

Compression is lossless. Original bytes per byte of fast LZ4 (`python -m benchmarks checkpoint`):

    weights and AdamW moments, float32   1.00    RGB images, uint8, rendered          2.37
    Humanoid-v5 observations, float32    1.33    depth images, float32, without noise 3.86
    Ant-v5 observations, float32 (zeros) 3.32    the same with sensor noise           1.00
    segmentation, uint8                 10.09

Compression pays for masks, images and values that are often zero. A tensor that does not shrink is
stored raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core import arguments
from ..core.arguments import flag, whole
from ..core.fields import flatten, unflatten
from ..core.lru_cache import LruCache
from ..core.records import flat_name
from ..errors import CorruptFileError, MissingFieldError, UsageError, nearest
from .lz4_frames import check_level, compress, decompress

#: Maximum number of decoded bytes of an LZ4 block. Larger tensors are split.
_PART_BYTES = 64 << 20


@dataclass(frozen=True)
class _Packed:
    """A compressed tensor.

    Attributes:
        parts: LZ4 blocks of the tensor's bytes; () if the tensor is stored in `raw`.
        raw: The uncompressed tensor on the CPU if LZ4 does not shrink it; else None.
        dtype, shape, device: Properties of the original tensor.
    """

    parts: tuple[bytes, ...]
    raw: torch.Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(map(len, self.parts)) if self.raw is None else self.raw.nbytes

    @property
    def num_decoded_bytes(self) -> int:
        """Bytes of the decoded tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CompressedTensorDict(Mapping[str, Any]):
    """A nested record with some tensors compressed.

    Args:
        tensordict: Nested mapping or `TensorDict`. Other leaves are stored without a copy.
        compress_keys: Leaves to compress: names with "/" between levels, or tuples of keys. The
            name of an inner mapping means all tensors below it.
        level: Level of LZ4: 0 is fast, up to 16 is smaller and slower to compress.
        cache: Number of decoded leaves in memory. The least recently used leaf is removed first. 0
            disables the cache.
        missing_ok: Ignore names that are not in the record.
        device: Device of returned tensors; None keeps the original device of each tensor.

    Raises:
        MissingFieldError: A name is not in the record (a `KeyError`).
        UsageError: A leaf named in `compress_keys` is no tensor.

    `self[key]` returns a new tensor, or a dict of new tensors for an inner mapping. Thread-safe.
    """

    def __init__(
        self,
        tensordict: Mapping[str, Any],
        compress_keys: Iterable[str | tuple[str, ...]] = (),
        level: int = 0,
        cache: int = 0,
        *,
        missing_ok: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.level = check_level(level)
        self.cache = whole("cache", cache, 0)
        self._device = arguments.optional_device("device", device)
        self._decoded: LruCache[str, torch.Tensor] = LruCache(self.cache)
        if not isinstance(tensordict, Mapping) and not hasattr(tensordict, "items"):
            raise UsageError(
                f"tensordict must be a nested mapping, got {type(tensordict).__name__}."
            )
        leaves = flatten(tensordict)
        missing_ok = flag("missing_ok", missing_ok)
        compressed = _leaves_to_compress(leaves, compress_keys, missing_ok)
        #: Leaves by flat name: a `_Packed` for a compressed leaf, otherwise the leaf itself.
        self._leaves: dict[str, Any] = {}
        for name, leaf in leaves.items():
            self._leaves[name] = _pack(leaf, self.level) if name in compressed else leaf

    def __getitem__(self, key: str | tuple[str, ...]) -> Any:
        """Return a decoded leaf, or a dict of leaves. Raise `MissingFieldError` (a `KeyError`)."""
        name = flat_name(key)
        if name in self._leaves:
            return self._decode(name)
        below = _names_at(name, self._leaves)
        if not below:
            raise MissingFieldError(
                f"unknown field {name!r}. The fields are {nearest(name, self._leaves)}."
            )
        return unflatten({leaf[len(name) + 1 :]: self._decode(leaf) for leaf in below})

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of the top level in the order of the record."""
        return iter(dict.fromkeys(name.split("/")[0] for name in self._leaves))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        name_or_keys: Any = key
        try:
            return bool(_names_at(flat_name(name_or_keys), self._leaves))
        except UsageError:
            return False

    def __repr__(self) -> str:
        leaves = f"{len(self.compressed_keys)} of {len(self._leaves)} leaves compressed"
        return f"CompressedTensorDict({leaves}, {self.nbytes} bytes, ratio {self.ratio():.2f})"

    @property
    def compressed_keys(self) -> tuple[str, ...]:
        """Flat names of the compressed leaves."""
        return tuple(name for name, leaf in self._leaves.items() if isinstance(leaf, _Packed))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors in memory, without the cache."""
        return sum(
            leaf.nbytes
            for leaf in self._leaves.values()
            if isinstance(leaf, (_Packed, torch.Tensor))
        )

    def ratio(self) -> float:
        """Return decoded bytes / compressed bytes of the compressed leaves; 1 if there are none."""
        packed = [leaf for leaf in self._leaves.values() if isinstance(leaf, _Packed)]
        num_bytes = sum(leaf.nbytes for leaf in packed)
        return sum(leaf.num_decoded_bytes for leaf in packed) / num_bytes if num_bytes else 1.0

    def decompress(self) -> dict[str, Any]:
        """Return all leaves of the record as a nested dict of new tensors."""
        return unflatten({name: self._decode(name) for name in self._leaves})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompressedTensorDict:
        """Return a copy of the record that decodes to another device.

        Both records share the compressed leaves, which are decoded to the device on access. All
        other leaves are copied to the device by this call. With `non_blocking`, copies from pinned
        memory complete later on their CUDA stream.
        """
        non_blocking = flag("non_blocking", non_blocking)
        other = CompressedTensorDict({}, level=self.level, cache=self.cache, device=device)
        other._leaves = {
            name: leaf.to(device, non_blocking=non_blocking)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for name, leaf in self._leaves.items()
        }
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the cache."""
        return {
            "level": self.level,
            "cache": self.cache,
            "_device": self._device,
            "_leaves": self._leaves,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._decoded = LruCache(self.cache)

    def _decode(self, name: str) -> Any:
        leaf = self._leaves[name]
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._device or leaf.device, copy=True)
        if not isinstance(leaf, _Packed):
            return leaf
        cached = self._decoded.get(name)
        if cached is not None:
            return cached.clone()
        decoded = _unpack(leaf, name).to(self._device or leaf.device)
        if self.cache:
            self._decoded.put(name, decoded.clone())
        return decoded


class CompressedDataCollector:
    """A collector whose records are `CompressedTensorDict`s, so that more records fit in memory.

    Args:
        base_collector: Iterable of nested mappings, `TensorDict`s or named tuples of tensors, such
            as a `RolloutDataset`. Each iteration starts a new iteration of `base_collector`. None
            fields of named tuples are left out.
        compress: False yields the records unchanged.
        compress_keys: Leaves to compress, as in `CompressedTensorDict`. None compresses every
            tensor.
        level: Level of LZ4, as in `CompressedTensorDict`.

    Raises:
        MissingFieldError: A name is not in a record (a `KeyError`).
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        compress: bool = True,
        compress_keys: Iterable[str | tuple[str, ...]] | None = None,
        level: int = 0,
    ) -> None:
        arguments.instance("base_collector", base_collector, "an iterable", Iterable)
        self.base_collector = base_collector
        self.compress = flag("compress", compress)
        self.level = check_level(level)
        if compress_keys is not None:
            arguments.instance("compress_keys", compress_keys, "field names", Iterable)
        is_name = isinstance(compress_keys, str)
        self.compress_keys: Any = (
            compress_keys if compress_keys is None or is_name else tuple(compress_keys)
        )

    def __iter__(self) -> Iterator[Any]:
        for record in self.base_collector:
            yield self._compressed(record) if self.compress else record

    def _compressed(self, record: Any) -> CompressedTensorDict:
        if isinstance(record, tuple) and hasattr(record, "_asdict"):
            record = {name: value for name, value in record._asdict().items() if value is not None}
        keys = self.compress_keys
        if keys is None and hasattr(record, "items"):
            keys = [
                name for name, leaf in flatten(record).items() if isinstance(leaf, torch.Tensor)
            ]
        return CompressedTensorDict(record, keys or (), self.level)


def _names_at(name: str, leaves: Iterable[str]) -> list[str]:
    """Return the flat names of the leaves at or below a name."""
    return [leaf for leaf in leaves if leaf == name or leaf.startswith(name + "/")]


def _leaves_to_compress(
    leaves: Mapping[str, Any], keys: Iterable[str | tuple[str, ...]], missing_ok: bool
) -> set[str]:
    """Return the flat names of the tensors that `keys` name directly or by a parent mapping.

    Raises:
        MissingFieldError: A key has no tensor, unless `missing_ok`.
        UsageError: A key names a leaf that is no tensor.
    """
    tensors: set[str] = set()
    if not isinstance(keys, Iterable):
        raise UsageError(f"compress_keys must be field names, got {keys!r}.")
    for key in [keys] if isinstance(keys, str) else keys:
        name = flat_name(key)
        if name in leaves and not isinstance(leaves[name], torch.Tensor):
            raise UsageError(
                f"field {name!r} of compress_keys must be a tensor, got "
                f"{type(leaves[name]).__name__}."
            )
        below = [leaf for leaf in _names_at(name, leaves) if isinstance(leaves[leaf], torch.Tensor)]
        if not below and not missing_ok:
            raise MissingFieldError(
                f"no tensor has the name {name!r} of compress_keys. The fields are "
                f"{nearest(name, leaves)}."
            )
        tensors.update(below)
    return tensors


def _pack(tensor: torch.Tensor, level: int) -> _Packed:
    """Compress a tensor, or store it raw if LZ4 does not shrink it."""
    on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: Any = on_cpu.reshape(-1).view(torch.uint8).numpy() if on_cpu.numel() else b""
    parts = tuple(
        compress(data[start : start + _PART_BYTES], level)
        for start in range(0, len(data), _PART_BYTES)
    )
    is_raw = sum(map(len, parts)) >= len(data)
    raw = on_cpu.clone() if is_raw else None
    return _Packed(() if is_raw else parts, raw, tensor.dtype, tuple(tensor.shape), tensor.device)


def _unpack(leaf: _Packed, name: str) -> torch.Tensor:
    if leaf.raw is not None:
        return leaf.raw.clone()
    parts = []
    num_left = leaf.num_decoded_bytes
    for part in leaf.parts:
        try:
            decoded = decompress(part, min(num_left, _PART_BYTES))
        except CorruptFileError as cause:
            raise CorruptFileError(f"Field {name!r} is damaged: {cause.message}") from cause
        parts.append(torch.frombuffer(decoded, dtype=torch.uint8))
        num_left -= len(decoded)
    # One part needs no copy: the result may share its memory, since a bytearray is writable.
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(leaf.dtype).view(leaf.shape)
