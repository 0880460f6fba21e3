"""Where mini-batches get their memory, and how they come to the device that wants them.

One rule: what is handed out is not shared. On the CPU memory comes from a pool; towards a GPU
it is pinned and travels on a stream of its own, on which the consumer's stream waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import arguments
from .buffer_pool import BufferPool


class Delivery:
    """Memory on one device, results on another or on the same.

    Args:
        device: Where results are made.
        output_device: Where they are wanted; None for the same.
    """

    def __init__(self, device: torch.device, output_device: torch.device | str | None = None) -> None:
        self.device = device
        given = device if output_device is None else output_device
        self.output_device = arguments.device("create a storage", "output_device", given)
        self._pool = BufferPool(max_buffers=16)
        self._stream: torch.cuda.Stream | None = None
        self._written: torch.cuda.Event | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Give memory for a result, on `device`."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.output_device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return self._pool.empty(shape, dtype)

    def note_write(self) -> None:
        """Remember that `device` was just written to; readers on other streams wait for it."""
        if self.device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self.device))

    def wait_for_writes(self) -> None:
        """Make the current stream wait until the last noted write is done; nothing to do on the CPU."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)

    def deliver(self, x: torch.Tensor) -> torch.Tensor:
        """Bring a result to `output_device`; `x` itself if it is there."""
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
