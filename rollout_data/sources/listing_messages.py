"""What one process tells others about the folders: only what they have not heard of.

One rule: all who take part hear every sight, in order, so that each can be told by the one before it.
"""

from __future__ import annotations

from typing import Any

from ..blocks.block import Block


class Sights:
    """What was seen of the folders (`Source.sight`), as told and heard by the processes that read together.

    Attributes:
        heard: The last one that was heard; may be replaced by an equal one.
    """

    def __init__(self) -> None:
        self.heard: Any = None
        self._told: tuple[Any, Any] = None, None

    def news(self, sight: Any) -> Any:
        """Shorten a sight to tell it: ranges `(start, stop)` of blocks of the last one heard; None: no change."""
        told = sight
        heard = self.heard
        if sight is heard:
            told = None
        elif heard is not None and sight[0] is heard[0] and len(sight) == len(heard) == 4:
            known = {_name(*placed): number for number, placed in enumerate(heard[3])}
            parts: list[Any] = []
            for placed in sight[3]:
                number = known.get(_name(*placed))
                if number is not None and parts and parts[-1][1] == number:
                    parts[-1] = parts[-1][0], number + 1
                else:
                    parts.append(placed if number is None else (number, number + 1))
            told = *sight[:3], parts
        self._told = told, sight
        return told

    def whole(self, told: Any) -> Any:
        """Return the sight that was told, by this process or another one; None: no change."""
        if told is None:
            return None
        if told is self._told[0]:
            self.heard = self._told[1]
        elif len(told) == 4:
            blocks: list[Any] = []
            for first, second in told[3]:
                blocks += [(first, second)] if isinstance(second, Block) else self.heard[3][first:second]
            self.heard = *told[:3], blocks
        else:
            self.heard = told
        return self.heard


def _name(folder: int, block: Block) -> tuple[Any, ...]:
    return folder, block.path.name, block.name, block.file_bytes, block.mtime_ns, block.sequence
