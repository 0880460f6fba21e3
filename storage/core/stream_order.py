"""`StreamOrder`: on CUDA, what one thread's stream wrote is there when another's stream reads it.

One rule: events order streams; the host never waits. On the CPU there is nothing to order.
"""

from __future__ import annotations

import torch


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
