"""`BufferMonitor`: the monitors of one buffer, told by the buffer, read by the user.

One rule: it passes on; what is measured how is in `live/monitors.py`.
"""

from __future__ import annotations

from typing import Any

from ..live.monitors import InTickMonitor, NaturalMonitor, OutTickMonitor


class BufferMonitor:
    """What goes in and out of a buffer: events per second, and values of the last pushes and samples.

    Args:
        window_s: Seconds over which rates are taken.
        window: Pushes, and samples, whose values are remembered.

    Attributes:
        pushed, sampled: Items per second (`NaturalMonitor`).
        in_ticks, out_ticks: Values per push and per sample.
    """

    def __init__(self, window_s: float = 10.0, window: int = 100) -> None:
        self.pushed, self.sampled = NaturalMonitor(window_s), NaturalMonitor(window_s)
        self.in_ticks, self.out_ticks = InTickMonitor(window), OutTickMonitor(window)
        self._parts: dict[str, Any] = {
            "pushed": self.pushed,
            "sampled": self.sampled,
            "in": self.in_ticks,
            "out": self.out_ticks,
        }

    def note_push(self, num_items: int, **values: Any) -> None:
        """Note a push; `values` as `InTickMonitor.record` takes them."""
        self.pushed.record(num_items)
        self.in_ticks.record(size=num_items, **values)

    def note_sample(self, num_items: int, **values: Any) -> None:
        """Note a sample; `values` as `OutTickMonitor.record` takes them."""
        self.sampled.record(num_items)
        self.out_ticks.record(size=num_items, **values)

    def snapshot(self) -> dict[str, int | float]:
        """Give the numbers of all four monitors: `pushed/rate`, `out/staleness_max`, ..."""
        return {f"{part}/{name}": x for part, one in self._parts.items() for name, x in one.snapshot().items()}

    def text(self) -> str:
        """Give one line."""
        return "; ".join(f"{part}: {one.text()}" for part, one in self._parts.items())

    def reset(self) -> None:
        """Forget everything."""
        for one in self._parts.values():
            one.reset()
