"""Messages that send folder listings between processes as differences from the last listing.

Every process receives all messages in the same order, so a message can refer to the previous
listing. A listing of block files is a tuple: `Scanner` class, schema, number of blocks that still
exist, and a list of pairs (number of the folder, block). A message is a listing in which ranges of
positions in the previous listing replace its blocks.
"""

from __future__ import annotations

from typing import Any

from ...blocks.block import Block


class ListingMessages:
    """Converter between folder listings and short messages, which contain only the changes.

    Attributes:
        last: The last received listing.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self._sent_message: Any = None
        self._sent_listing: Any = None

    def shorten(self, listing: Any) -> Any:
        """Convert a listing to a short message to another process; None if nothing has changed.

        Listings of other formats than block files are sent unchanged.
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
        """Return the listing that a message describes; None if nothing has changed."""
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
        """Return whether a listing can be sent as changes, since the last one has the same format."""
        return (
            self.last is not None
            and listing[0] is self.last[0]
            and len(listing) == len(self.last) == 4
        )

    def _ranges(self, blocks: Any) -> list[Any]:
        """Shorten a list of blocks: known blocks become ranges of positions in the last listing."""
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
