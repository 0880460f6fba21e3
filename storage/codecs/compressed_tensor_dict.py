"""`CompressedTensorDict`: a nested record some of whose tensors are held as LZ4 bytes; and a collector of such.

One rule: what was put in comes out, bit by bit, as fresh tensors; the record given is never changed.
What fast LZ4 saves, measured (`python -m benchmarks checkpoint`), as size before over size after:

    weights and AdamW moments, float32   1.00    RGB images, uint8, rendered          2.37
    Humanoid-v5 observations, float32    1.33    depth images, float32, without noise 3.86
    Ant-v5 observations, float32 (zeros) 3.32    the same with sensor noise           1.00
    segmentation, uint8                 10.09

So it is worth it for masks, images and what is often zero; where it saves nothing the raw bytes are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core import arguments
from ..core.arguments import flag, whole
from ..core.fields import flatten, unflatten
from ..core.records import flat_name
from ..errors import CorruptFileError, MissingFieldError, UsageError, nearest
from .lz4_frames import check_level, compress, decompress

#: LZ4 blocks end here; what is larger is cut into parts.
_PART_BYTES = 64 << 20


@dataclass(frozen=True)
class _Packed:
    """A tensor as bytes: parts of LZ4, or the tensor itself on the CPU where that saves nothing."""

    parts: tuple[bytes, ...]
    raw: torch.Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts)) if self.raw is None else self.raw.nbytes

    @property
    def num_decoded_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CompressedTensorDict(Mapping[str, Any]):
    """A nested record with some tensors compressed.

    Args:
        tensordict: Nested mapping, or a `TensorDict`; what is not compressed is kept as it is, not copied.
        compress_keys: Which leaves: names with "/" between levels, or tuples of keys. A name of an inner
            mapping stands for all tensors below it.
        level: Of LZ4: 0 fast, up to 16 smaller and slower to make.
        cache: How many decoded leaves are kept, those used last; 0 for none.
        missing_ok: Ignore names that the record lacks.
        device: Where tensors are given; None for where each was.

    Raises:
        MissingFieldError: The record lacks a name (a `KeyError`).
        UsageError: A named leaf is no tensor.

    Reading `self[key]` gives a new tensor each time, which may be written to, whether the leaf is compressed
    or not; an inner mapping is given as a dict of such. Methods may be called from any thread.
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
        self.level = check_level("compress tensors", level)
        self.cache = whole("compress tensors", "a cache", cache, 0)
        self._device = arguments.optional_device("compress tensors", "device", device)
        self._lock = threading.Lock()
        self._decoded: OrderedDict[str, torch.Tensor] = OrderedDict()
        if not isinstance(tensordict, Mapping) and not hasattr(tensordict, "items"):
            action = "create CompressedTensorDict"
            raise UsageError(action, "", "tensordict as a nested mapping", type(tensordict).__name__)
        leaves = flatten(tensordict)
        chosen = _chosen(leaves, compress_keys, flag("compress tensors", "missing_ok", missing_ok))
        #: Flat name -> `_Packed`, or the leaf itself.
        self._leaves = {name: _pack(leaf, self.level) if name in chosen else leaf for name, leaf in leaves.items()}

    def __getitem__(self, key: str | tuple[str, ...]) -> Any:
        """Return a leaf, decoded, or the dict below a key. A `KeyError` lists the keys there are."""
        name = flat_name(key)
        if name in self._leaves:
            return self._decode(name)
        below = _names_at(name, self._leaves)
        if not below:
            raise MissingFieldError("read", repr(name), nearest(name, self._leaves), "another name")
        return unflatten({one[len(name) + 1 :]: self._decode(one) for one in below})

    def __iter__(self) -> Iterator[str]:
        """Name the keys of the top level, in the order of the record."""
        return iter(dict.fromkeys(name.split("/")[0] for name in self._leaves))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        given: Any = key
        try:
            return bool(_names_at(flat_name(given), self._leaves))
        except UsageError:
            return False

    def __repr__(self) -> str:
        leaves = f"{len(self.compressed_keys)} of {len(self._leaves)} leaves compressed"
        return f"CompressedTensorDict({leaves}, {self.nbytes} bytes, ratio {self.ratio():.2f})"

    @property
    def compressed_keys(self) -> tuple[str, ...]:
        """Flat names of the leaves that are held as bytes."""
        return tuple(name for name, leaf in self._leaves.items() if isinstance(leaf, _Packed))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are held; decoded ones in the cache are not counted."""
        return sum(leaf.nbytes for leaf in self._leaves.values() if isinstance(leaf, (_Packed, torch.Tensor)))

    def ratio(self) -> float:
        """How many times smaller the compressed leaves are than decoded; 1 if there are none."""
        packed = [leaf for leaf in self._leaves.values() if isinstance(leaf, _Packed)]
        held = sum(leaf.nbytes for leaf in packed)
        return sum(leaf.num_decoded_bytes for leaf in packed) / held if held else 1.0

    def decompress(self) -> dict[str, Any]:
        """Return the whole record as a nested dict of new tensors."""
        return unflatten({name: self._decode(name) for name in self._leaves})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompressedTensorDict:
        """Return the same record for another device: leaves that are not compressed are moved now, others when read.

        Leaves that are moved from pinned memory with `non_blocking` arrive later on their CUDA stream.

        The bytes are shared with this one, which stays as it is.
        """
        non_blocking = flag("move tensors", "non_blocking", non_blocking)
        other = CompressedTensorDict({}, level=self.level, cache=self.cache, device=device)
        other._leaves = {
            name: leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in self._leaves.items()
        }
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock and the decoded leaves behind."""
        return {"level": self.level, "cache": self.cache, "_device": self._device, "_leaves": self._leaves}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._decoded = OrderedDict()

    def _decode(self, name: str) -> Any:
        leaf = self._leaves[name]
        if not isinstance(leaf, _Packed):
            return leaf.to(self._device or leaf.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf
        with self._lock:
            found = self._decoded.get(name)
            if found is not None:
                self._decoded.move_to_end(name)
                return found.clone()
        decoded = _unpack(leaf, name).to(self._device or leaf.device)
        if self.cache:
            with self._lock:
                self._decoded[name] = decoded.clone()
                while len(self._decoded) > self.cache:
                    self._decoded.popitem(last=False)
        return decoded


class CompressedDataCollector:
    """Iterate over the records of a collector as `CompressedTensorDict`s, so that many of them fit in memory.

    Args:
        base_collector: Any iterable of nested mappings, `TensorDict`s or named tuples of tensors, such as a
            `RolloutDataset`; iterating again starts it anew. Fields of a named tuple that are None are left out.
        compress: False yields the records as they are.
        compress_keys: Which leaves; see `CompressedTensorDict`. None compresses every tensor.
        level: Of LZ4; see `CompressedTensorDict`.

    Raises:
        MissingFieldError: A record lacks a name (a `KeyError`).
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        compress: bool = True,
        compress_keys: Iterable[str | tuple[str, ...]] | None = None,
        level: int = 0,
    ) -> None:
        action = "create CompressedDataCollector"
        if not isinstance(base_collector, Iterable):
            raise UsageError(action, "", "base_collector as an iterable", type(base_collector).__name__)
        self.base_collector = base_collector
        self.compress = flag(action, "compress", compress)
        self.level = check_level(action, level)
        if compress_keys is not None:
            arguments.instance(action, "compress_keys", compress_keys, "as names of leaves", Iterable)
        is_one = compress_keys is None or isinstance(compress_keys, str)
        self.compress_keys: Any = compress_keys if is_one else tuple(compress_keys or ())

    def __iter__(self) -> Iterator[Any]:
        for record in self.base_collector:
            yield self._compressed(record) if self.compress else record

    def _compressed(self, record: Any) -> CompressedTensorDict:
        if isinstance(record, tuple) and hasattr(record, "_asdict"):
            record = {name: value for name, value in record._asdict().items() if value is not None}
        keys = self.compress_keys
        if keys is None and hasattr(record, "items"):
            keys = [name for name, leaf in flatten(record).items() if isinstance(leaf, torch.Tensor)]
        return CompressedTensorDict(record, keys or (), self.level)


def _names_at(name: str, leaves: Iterable[str]) -> list[str]:
    """List the leaf of this name, or those below it."""
    return [one for one in leaves if one == name or one.startswith(name + "/")]


def _chosen(leaves: Mapping[str, Any], keys: Iterable[str | tuple[str, ...]], missing_ok: bool) -> set[str]:
    chosen: set[str] = set()
    if not isinstance(keys, Iterable):
        raise UsageError("compress tensors", "", "compress_keys as names of leaves", repr(keys))
    for key in [keys] if isinstance(keys, str) else keys:
        name = flat_name(key)
        if name in leaves and not isinstance(leaves[name], torch.Tensor):
            raise UsageError("compress the leaf", repr(name), "a tensor", type(leaves[name]).__name__)
        found = [one for one in _names_at(name, leaves) if isinstance(leaves[one], torch.Tensor)]
        if not found and not missing_ok:
            raise MissingFieldError("compress", repr(name), nearest(name, leaves), "another name")
        chosen.update(found)
    return chosen


def _pack(tensor: torch.Tensor, level: int) -> _Packed:
    """Compress a tensor; keep it raw where that saves nothing."""
    on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: Any = on_cpu.reshape(-1).view(torch.uint8).numpy() if on_cpu.numel() else b""
    parts = tuple(compress(data[start : start + _PART_BYTES], level) for start in range(0, len(data), _PART_BYTES))
    is_raw = sum(map(len, parts)) >= len(data)
    raw = on_cpu.clone() if is_raw else None
    return _Packed(() if is_raw else parts, raw, tensor.dtype, tuple(tensor.shape), tensor.device)


def _unpack(leaf: _Packed, name: str) -> torch.Tensor:
    if leaf.raw is not None:
        return leaf.raw.clone()
    parts = []
    left = leaf.num_decoded_bytes
    for part in leaf.parts:
        try:
            decoded = decompress(part, min(left, _PART_BYTES))
        except CorruptFileError as cause:
            raise CorruptFileError("decompress the leaf", repr(name), "what was compressed", cause.got) from cause
        parts.append(torch.frombuffer(decoded, dtype=torch.uint8))
        left -= len(decoded)
    # A bytearray may be written to, so that a leaf of one part need not be copied.
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(leaf.dtype).view(leaf.shape)
