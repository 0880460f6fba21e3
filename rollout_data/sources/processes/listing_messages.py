"""Messages about what is in the folders, between processes that read together: only what is new is sent.

Every process receives every message, in the same order. So each message can refer to the listing
before it.
"""

from __future__ import annotations

from typing import Any

from ...blocks.block import Block


class ListingMessages:
    """Shorten the listings of `LiveSource.listing` to messages, and restore them.

    Attributes:
        last: The listing that was received last. It may be replaced by an equal one.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self._sent_message: Any = None
        self._sent_listing: Any = None

    def shorten(self, listing: Any) -> Any:
        """Return a message for a listing: ranges `(start, stop)` of blocks of the last listing, and new blocks.

        It is None where nothing has changed.
        """
        message = listing
        if listing is self.last:
            message = None
        elif self._is_like_last(listing):
            kind, schema, num_present, blocks = listing
            message = kind, schema, num_present, self._ranges(blocks)
        self._sent_message = message
        self._sent_listing = listing
        return message

    def restore(self, message: Any) -> Any:
        """Return the listing of a message from this or another process; None where nothing has changed."""
        if message is None:
            return None
        if message is self._sent_message:
            self.last = self._sent_listing
        elif len(message) == 4:
            kind, schema, num_present, parts = message
            blocks: list[Any] = []
            for first, second in parts:
                is_new = isinstance(second, Block)
                blocks += [(first, second)] if is_new else self.last[3][first:second]
            self.last = kind, schema, num_present, blocks
        else:
            self.last = message
        return self.last

    def _is_like_last(self, listing: Any) -> bool:
        """Return whether a listing and the last one are both of block files."""
        return (
            self.last is not None
            and listing[0] is self.last[0]
            and len(listing) == len(self.last) == 4
        )

    def _ranges(self, blocks: Any) -> list[Any]:
        """Replace blocks that are in the last listing by ranges of their numbers there."""
        number_of = {_identity(*placed): number for number, placed in enumerate(self.last[3])}
        parts: list[Any] = []
        for placed in blocks:
            number = number_of.get(_identity(*placed))
            if number is None:
                parts.append(placed)
            elif parts and parts[-1][1] == number:
                parts[-1] = parts[-1][0], number + 1
            else:
                parts.append((number, number + 1))
        return parts


def _identity(folder: int, block: Block) -> tuple[Any, ...]:
    return folder, block.path.name, block.name, block.file_bytes, block.mtime_ns, block.sequence
