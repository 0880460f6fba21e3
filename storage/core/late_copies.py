"""Asynchronous copies of nested values from a CUDA device to the host.

The tensors are packed into one block on the device. One asynchronous copy transfers the block into
pinned memory of the host. Values are returned after the copy has finished.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .memory import lasting

#: Alignment of tensors in a block, in bytes. Aligned bytes can be viewed as any dtype.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class _Place:
    """Placeholder in nested values for a CUDA tensor whose copy is not on the host yet.

    `number` is the index of the tensor among the tensors that are copied together.
    """

    number: int


class _Buffer:
    """Memory on a device, and pinned memory on the host, for tensors of fixed shape and dtype."""

    @lasting
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.form = _form_of(tensors)
        spans = []
        num_bytes = 0
        for tensor in tensors:
            spans.append((num_bytes, num_bytes + tensor.nbytes, tensor.dtype, tensor.shape))
            num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

        def parts(block: torch.Tensor) -> list[torch.Tensor]:
            return [
                block[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in spans
            ]

        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device)
        self.on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.device_parts = parts(self.on_device)
        self.host_parts = parts(self.on_host)
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]


def _form_of(tensors: list[torch.Tensor]) -> list[tuple[torch.device, torch.dtype, torch.Size]]:
    return [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]


class LateCopies:
    """Queue of asynchronous copies of nested values from a CUDA device, first in first out.

    Attributes:
        MAX_COPIES: Maximum number of pending copies. `release` makes room for another copy.
        num_waits: Number of times that the host waited for a copy.
    """

    MAX_COPIES = 3

    def __init__(self) -> None:
        self.num_waits = 0
        #: Pending copies, oldest first: the nested values with a placeholder for each CUDA tensor,
        #: the argument `about` of `send`, and the buffer with the tensors.
        self._copies: deque[tuple[Any, Any, _Buffer]] = deque()
        self._free_buffers: list[_Buffer] = []
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Return the number of pending copies."""
        return len(self._copies)

    @property
    def is_full(self) -> bool:
        """Whether the number of pending copies is `MAX_COPIES`."""
        return len(self._copies) >= self.MAX_COPIES

    @lasting
    def send(self, values: Any, about: Any = None) -> None:
        """Start a copy of nested values. The caller may change the values after this call.

        Args:
            values: Nested mappings, lists and tuples of tensors, arrays and other values. Tensors
                of one CUDA device are copied asynchronously, in the order of the current stream.
                All other values are copied immediately.
            about: Any object, which `receive` returns together with the values.
        """
        on_device: list[torch.Tensor] = []
        values_on_host = _copied(values, on_device)
        buffer = self._buffer_for(on_device)
        device = on_device[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(buffer.device_parts, on_device)
        # A separate stream, so that later work of the current stream does not wait for the copy.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            buffer.on_host.copy_(buffer.on_device, non_blocking=True)
        buffer.arrived.record(self._stream)
        self._copies.append((values_on_host, about, buffer))

    def receive(self, wait: bool) -> tuple[Any, Any] | None:
        """Return the oldest pending values with all tensors on the host, and their `about` object.

        The values remain pending until `release`. After `release`, later calls of `send` reuse the
        memory of the tensors, so copy tensors that you need longer.

        Args:
            wait: Whether to wait for the copy. Otherwise the result is None while the copy runs.

        Returns:
            (values, about), or None if no copy is pending.
        """
        if not self._copies:
            return None
        values, about, buffer = self._copies[0]
        if not buffer.arrived.query():  # type: ignore[no-untyped-call]
            if not wait:
                return None
            self.num_waits += 1
            buffer.arrived.synchronize()
        return _with_tensors(values, buffer.host_parts), about

    def release(self) -> None:
        """Remove the oldest pending values after `receive`. Later copies may reuse their memory."""
        *_, buffer = self._copies.popleft()
        self._free_buffers.append(buffer)

    def _buffer_for(self, tensors: list[torch.Tensor]) -> _Buffer:
        form = _form_of(tensors)
        while self._free_buffers:
            buffer = self._free_buffers.pop(0)
            if buffer.form == form:
                return buffer
        return _Buffer(tensors)


def has_device_tensors(values: Any) -> bool:
    """Return whether nested mappings, lists and tuples contain a tensor on a CUDA device."""
    if isinstance(values, torch.Tensor):
        return _is_sent(values)
    if hasattr(values, "items"):
        return any(map(has_device_tensors, values.values()))
    return isinstance(values, (list, tuple)) and any(map(has_device_tensors, values))


def _is_sent(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.layout == torch.strided


def _copied(value: Any, on_device: list[torch.Tensor]) -> Any:
    """Copy nested values on the host, with a placeholder for each CUDA tensor.

    CUDA tensors are not copied. They are appended to `on_device`.
    """
    if isinstance(value, torch.Tensor):
        if not _is_sent(value):
            return value.detach().clone()
        on_device.append(value.detach())
        return _Place(len(on_device) - 1)
    if hasattr(value, "items"):
        return {name: _copied(item, on_device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item, on_device) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    return copy.deepcopy(value)


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace the placeholders in nested values by the copied tensors."""
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {name: _with_tensors(item, tensors) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
