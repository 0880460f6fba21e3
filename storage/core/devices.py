"""Memory on CPU and CUDA: results in pinned or pooled memory, and streams that wait for each other.

One rule: events order streams, and the host never waits; on the CPU there is nothing to order. What is handed out is
not shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import arguments
from .memory import BufferPool


class StreamOrder:
    """Order the writes and reads of one object's memory among streams.

    Args:
        device: Where the memory is.

    Call `wait` before touching the memory and `record` after it, both under the object's lock:
    a reader waits for the last write, a writer for the last write and for all reads since then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_needed = device.type == "cuda"
        self._written: torch.cuda.Event | None = None
        self._read: dict[int, torch.cuda.Event] = {}

    def wait(self, is_write: bool) -> None:
        """Let the current stream wait for what it must not overtake."""
        if not self.is_needed:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._written is not None:
            stream.wait_event(self._written)
        if is_write:
            for event in self._read.values():
                stream.wait_event(event)
            self._read.clear()

    def record(self, is_write: bool) -> None:
        """Note that the current stream has been given its work."""
        if not self.is_needed:
            return
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        if is_write:
            self._written = event
        else:
            self._read[stream.cuda_stream] = event


class Delivery:
    """Memory for results on one device, which are wanted on another or on the same.

    Args:
        device: Where results are made. On the CPU their memory is pinned for CUDA, else from a pool.
        output_device: Where they are wanted; None for the same.
    """

    def __init__(self, device: torch.device, output_device: torch.device | str | None = None) -> None:
        self.device = device
        given = device if output_device is None else output_device
        self.output_device = arguments.device("create a storage", "output_device", given)
        self._pool = BufferPool(max_buffers=16)
        self._stream: torch.cuda.Stream | None = None
        #: Of writes to `device`, and of reads.
        self.order = StreamOrder(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Give memory for a result, on `device`."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.output_device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return self._pool.empty(shape, dtype)

    def deliver(self, x: torch.Tensor) -> torch.Tensor:
        """Bring a result to `output_device`, on a stream of its own; `x` itself if it is there."""
        if x.device == self.output_device:
            return x
        if self.output_device.type != "cuda" or not x.is_pinned():
            return x.to(self.output_device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.output_device)  # type: ignore[no-untyped-call]
        consumer = torch.cuda.current_stream(self.output_device)
        with torch.cuda.stream(self._stream):
            moved = x.to(self.output_device, non_blocking=True)
        consumer.wait_stream(self._stream)
        moved.record_stream(consumer)
        return moved
