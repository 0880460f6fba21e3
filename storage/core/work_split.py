"""Work on many bytes, split over as many threads as torch is told to use.

One rule: what one thread does in about a millisecond, or in pieces too short for the interpreter's lock, is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from .arguments import whole
from .threads import each, num_processors

#: What a thread must have to do to be worth its start, and what a piece must be so that threads rarely wait for
#: the interpreter's lock.
MIN_BYTES, MIN_PIECE_BYTES = 1 << 20, 1 << 14
#: Each thread does so many parts, one after the other: a late one does fewer.
_NUM_PARTS = 4


class WorkSplit:
    """Runs pieces of work in one thread or in several.

    Args:
        num_threads: Most threads; None takes torch's number of threads (1 in a DataLoader worker).
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = None if num_threads is None else whole("split work", "num_threads", num_threads, 1)

    def run(self, function: Callable[[int, int], object], num_pieces: int, num_bytes: int, _: Hashable = "") -> int:
        """Call `function(start, stop)` for parts that cover `range(num_pieces)`; give the number of threads.

        Args:
            function: Does the pieces `start:stop`, perhaps beside others that do other pieces; must release the
                interpreter's lock to gain anything.
            num_pieces: How many pieces of about equal size there are.
            num_bytes: How much they are together.

        Raises:
            Whatever `function` raises, when no part is under way any more; the others are left undone.
        """
        limit = self.num_threads or torch.get_num_threads()
        num_threads = min(limit, num_processors(), num_pieces, num_bytes // MIN_BYTES)
        if num_threads < 2 or num_bytes < MIN_PIECE_BYTES * num_pieces:
            function(0, num_pieces)
            return 1
        step = -(-num_pieces // (_NUM_PARTS * num_threads))
        parts = [(start, min(start + step, num_pieces)) for start in range(0, num_pieces, step)]
        each(lambda part: function(*part), parts, num_threads)
        return num_threads
