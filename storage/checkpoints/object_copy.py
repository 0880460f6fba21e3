"""One moment of a nested object: every tensor copied once, into reused memory; everything else deep-copied.

One rule: nothing in the copy shares memory with the original, and what shared memory in the original
shares it in the copy. Copying into fresh memory costs several times the copying itself (page faults),
so all tensors of a copy stand side by side in one buffer that returns to its pool when they are gone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

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
    found: dict[int, torch.Tensor] = {}
    _find_tensors(obj, found)
    # deepcopy takes what the memo holds for an object, wherever it meets the object.
    copies = _copy_tensors(found, pool)
    return copy.deepcopy(obj, dict(copies))


def _find_tensors(obj: Any, found: dict[int, torch.Tensor]) -> None:
    """Collect by `id` the tensors that are plain memory; others are left to deepcopy."""
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


@dataclass(frozen=True)
class _Run:
    """A run of bytes of one storage, and the tensors that lie in it."""

    tensors: list[torch.Tensor]
    #: First byte within the storage; None if the one tensor is to be copied value by value.
    start: int | None
    num_bytes: int

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def room(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _copy_tensors(found: Mapping[int, torch.Tensor], pool: BufferPool) -> dict[int, torch.Tensor]:
    """Copy tensors by `id`; the bytes of each storage once."""
    runs = _runs(found)
    buffer = pool.take(sum(run.room for run in runs if run.device.type == "cpu")).numpy()
    streams = {device: _side_stream(device) for device in {run.device for run in runs} if device.type == "cuda"}
    copies: dict[int, torch.Tensor] = {}
    start = 0
    with torch.no_grad():
        for run in runs:
            if run.device.type == "cpu":
                # Tensors over slices of an array have storages of their own; slices of a tensor have not.
                copies |= _copy_run(run, torch.from_numpy(buffer[start : start + run.num_bytes]))
                start += run.room
            elif run.device.type == "cuda":
                with torch.cuda.stream(streams[run.device]):
                    pinned = torch.empty(run.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                    copies |= _copy_run(run, pinned)
            else:
                copies |= {id(tensor): tensor.detach().cpu() for tensor in run.tensors}
        for stream in streams.values():
            stream.synchronize()
        return {key: _like(found[key], tensor) for key, tensor in copies.items()}


def _runs(found: Mapping[int, torch.Tensor]) -> list[_Run]:
    """Decide which bytes are copied: of each storage those between its first and its last tensor."""
    groups: dict[tuple[str, int], list[torch.Tensor]] = {}
    runs = []
    for tensor in found.values():
        pointer = tensor.untyped_storage().data_ptr()
        if not tensor.numel() or not pointer or tensor.is_conj() or tensor.is_neg():
            runs.append(_Run([tensor], None, tensor.nbytes))
        else:
            groups.setdefault((str(tensor.device), pointer), []).append(tensor)
    for tensors in groups.values():
        spans = [_span(tensor) for tensor in tensors]
        reach = spans[0][1] - spans[0][0]
        if len(tensors) == 1 and (tensors[0].is_contiguous() or reach > tensors[0].nbytes):
            runs.append(_Run(tensors, None, tensors[0].nbytes))  # nothing shared, and no strides worth keeping
        else:
            # Aligned down, so that every dtype's offset stays a whole number of its elements.
            start = min(first for first, _ in spans) // _ALIGNMENT * _ALIGNMENT
            runs.append(_Run(tensors, start, max(stop for _, stop in spans) - start))
    return runs


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Say which bytes of its storage a tensor with values reaches over, `(first, stop)`."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def _copy_run(run: _Run, target: torch.Tensor) -> dict[int, torch.Tensor]:
    """Copy a run to `target`, `[num_bytes]` uint8 on the CPU; without waiting if that is pinned."""
    if run.start is None:
        tensor = run.tensors[0].detach()
        if not run.num_bytes:  # strides of no bytes cannot be viewed as another dtype
            return {id(run.tensors[0]): torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")}
        return {id(run.tensors[0]): target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)}
    # torch copies wide elements a quarter faster than bytes.
    word = next(dtype for dtype in _WORDS if run.num_bytes % dtype.itemsize == 0)
    source = torch.empty(0, dtype=word, device=run.device)
    place, size = run.start // word.itemsize, run.num_bytes // word.itemsize
    source.set_(run.tensors[0].untyped_storage(), place, (size,), (1,))
    target.view(word).copy_(source, non_blocking=True)
    storage = target.untyped_storage()
    return {
        id(tensor): torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, tensor.storage_offset() - run.start // tensor.itemsize, tensor.shape, tensor.stride()
        )
        for tensor in run.tensors
    }


def _like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, original.requires_grad)
    return tensor


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Give a stream that comes after what has been started on the device."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
