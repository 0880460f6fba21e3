"""One moment of a nested object: every tensor copied once, into reused memory; everything else deep-copied.

One rule: nothing in the copy shares memory with the original, and what shared memory in the original
shares it in the copy. Copying into fresh memory costs several times the copying itself (page faults),
so all tensors of a copy stand side by side in one buffer that returns to its pool when they are gone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from ..core.memory import BufferPool

#: Every tensor starts at a multiple of this in the buffer; no dtype needs more.
_ALIGNMENT = 64
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_object(obj: Any, pool: BufferPool) -> Any:
    """Copy a nested dict, list, tuple, named tuple, dataclass or other object as it is at this moment.

    Args:
        obj: Anything. Tensors in it may be on any device, share storage or occur more than once.
        pool: Where the memory of tensors that are on the CPU comes from.

    Returns:
        The same structure, on the CPU. Tensors are detached; parameters stay parameters, strides stay
        unless they leave gaps. Other leaves are deep-copied, with the errors of `copy.deepcopy`.
    """
    # deepcopy takes what the memo holds for an object, wherever it meets the object.
    return copy.deepcopy(obj, dict[int, Any](_copy_tensors(_find_tensors(obj), pool)))


def _find_tensors(obj: Any) -> dict[int, torch.Tensor]:
    """Collect by `id` the tensors that are plain memory; others are left to deepcopy."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting = [obj]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, (str, bytes, int, float, type, ModuleType, FunctionType)):
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            is_plain = type(node) in (torch.Tensor, torch.nn.Parameter) and node.layout is torch.strided
            if is_plain and not node.is_quantized and node.device.type != "meta":
                found[id(node)] = node
        elif isinstance(node, Mapping):
            waiting.extend(node.values())
            waiting.extend(getattr(node, "__dict__", {}).values())
        elif isinstance(node, (list, tuple, set, frozenset)):
            waiting.extend(node)
        else:
            waiting.extend(getattr(node, "__dict__", {}).values())
    return found


def _copy_tensors(found: Mapping[int, torch.Tensor], pool: BufferPool) -> dict[int, torch.Tensor]:
    """Copy tensors by `id`: of each storage once, the bytes from its first to its last tensor."""
    copies: dict[int, torch.Tensor] = {}
    groups: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for key, tensor in found.items():
        # Of x.conj() and its imaginary part memory holds another number, and a flag.
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.numel():
            groups.setdefault((str(plain.device), plain.untyped_storage().data_ptr()), {})[key] = plain
        else:
            copies[key] = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    spans = [_span(group) for group in groups.values()]
    buffer = pool.take(sum(span.room for span in spans if not span.is_on_cuda)).numpy()
    start = 0
    for span in spans:
        if span.is_on_cuda:
            target = torch.empty(span.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            # Tensors over slices of an array have storages of their own; slices of a tensor have not.
            target = torch.from_numpy(buffer[start : start + span.num_bytes])
            start += span.room
        copies |= _copy_span(span, target)
    for device in {span.device for span in spans if span.is_on_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return {key: _like(found[key], tensor) for key, tensor in copies.items()}


class _Span(NamedTuple):
    """Some bytes of one storage, and the tensors that lie in it, by `id`."""

    tensors: Mapping[int, torch.Tensor]
    start: int
    num_bytes: int
    device: torch.device

    @property
    def room(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def is_on_cuda(self) -> bool:
        return self.device.type == "cuda"


def _span(group: dict[int, torch.Tensor]) -> _Span:
    """Say which bytes of their storage tensors with values reach over; one that leaves gaps is packed first."""
    starts, stops = [], []
    for key, tensor in group.items():
        reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if len(group) == 1 and reach >= tensor.numel():
            group[key] = tensor = tensor.contiguous()
            reach = tensor.numel() - 1
        starts.append(int(tensor.storage_offset()) * tensor.itemsize)
        stops.append(starts[-1] + (reach + 1) * tensor.itemsize)
    start = min(starts)
    if len(group) > 1:  # aligned down, so that every dtype's offset stays a whole number of its elements
        start = start // _ALIGNMENT * _ALIGNMENT
    return _Span(group, start, max(stops) - start, tensor.device)


def _copy_span(span: _Span, target: torch.Tensor) -> dict[int, torch.Tensor]:
    """Copy a span to `target`, `[num_bytes]` uint8 on the CPU, without waiting if that is pinned."""
    # torch copies wide elements a quarter faster than bytes.
    word = next(dtype for dtype in _WORDS if (span.start | span.num_bytes) % dtype.itemsize == 0)
    source = torch.empty(0, dtype=word, device=span.device)
    place, size = span.start // word.itemsize, span.num_bytes // word.itemsize
    source.set_(next(iter(span.tensors.values())).untyped_storage(), place, (size,), (1,))
    target.view(word).copy_(source, non_blocking=True)
    storage = target.untyped_storage()
    return {
        key: torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, tensor.storage_offset() - span.start // tensor.itemsize, tensor.shape, tensor.stride()
        )
        for key, tensor in span.tensors.items()
    }


def _like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, original.requires_grad)
    return tensor
