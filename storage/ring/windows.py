"""Which windows are inside one trajectory: the age column, and exact draws from it.

One rule: the age of a row is the number of rows since its trajectory began; a window of L rows
that ends at row e is valid if and only if `age[e] >= L - 1` and its first row is live. No list of
boundaries is searched, so that neither writing nor drawing costs more in a larger ring.
Only this file knows window bounds.

Draws are by rejection: candidates are uniform over a superset of what is valid, each is accepted
if it is valid, and the first accepted ones are taken. Accepted candidates are independent and
uniform over the valid ones whatever the rate of acceptance is, and the rate itself decides only how
many candidates are proposed, so that the law is exact. Where next to nothing is valid, the
candidates are listed once instead, which is the same law; if none is, the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.host_arrays import own, tensor_of, zeroed
from ..core.modes import lasting
from ..core.samplers import uniform
from .ring import RingStore

#: (lane, row id of the window's last row) -> whether the window is valid.
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Candidates -> those that are accepted, in their order. On the CPU they are arrays, as numpy takes a third of the
#: time of torch for some hundred numbers; elsewhere tensors.
_Accept = Callable[[Any], Any]
#: Candidates that are proposed in vain before all are listed: so many, and so many per draw.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: Candidates that are listed at once, which bounds the memory of listing.
_NUM_LISTED = 1 << 20
#: Ages stop here, far above any window, so that they never overflow.
_MAX_AGE = 1 << 29


class Boundaries:
    """Ages of the rows of a ring, and where trajectories ended.

    Args:
        ring: The ring, whose `total` must be what it was when these rows were noted.
        keeps_segments: Whether ended trajectories are listed, for draws by trajectory. On CUDA that
            costs one synchronization per write.
    """

    @lasting
    def __init__(self, ring: RingStore, keeps_segments: bool = False) -> None:
        self.ring = ring
        #: Of every slot and lane; time first, so that a step of many lanes is written in one piece.
        self.ages = zeroed((ring.num_slots, ring.num_lanes), torch.int32, ring.device)
        #: Age of each lane's next row; 0 if the last written row ended a trajectory.
        self.next_ages = torch.zeros(ring.num_lanes, dtype=torch.int32, device=ring.device)
        self.segments = Segments(ring) if keeps_segments else None
        self.rejection = Rejection()
        # As arrays on the CPU, where numpy takes a third of the time for few rows.
        self._ages, self._next_ages = own(self.ages), own(self.next_ages)

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for what is known of rows."""
        return self.ages.nbytes

    def note(self, ends: Any) -> None:
        """Note rows that are about to be written: `ends` is `[n, lanes]` bool. Call it before the ring's `write`.

        Args:
            ends: A tensor, or, if the ring is on the CPU, an array, which with one lane may be `[n]`.
        """
        ring, num_rows = self.ring, len(ends)
        if not num_rows:
            return
        is_cpu = isinstance(self._ages, np.ndarray)
        if isinstance(ends, torch.Tensor):
            ends = own(ends.to(ring.device))
        ends = ends.reshape((num_rows, ring.num_lanes))
        if self.segments is not None:
            self.segments.note(ends if is_cpu else ends.cpu().numpy(), self.next_ages, ring.total)
        if num_rows == 1:
            slot = ring.total % ring.num_slots
            self._ages[slot] = self._next_ages
            self._next_ages += 1
            if not is_cpu or ring.num_lanes > 1 or ends.item():  # a question to a GPU would wait for it
                self._next_ages *= ~ends[0]
            if not slot:
                self.next_ages.clamp_(max=_MAX_AGE)
            return
        # The step since which a lane's trajectory lasts: below 0 where it began before these rows.
        steps: Any
        if is_cpu:
            steps = np.arange(1, num_rows + 1, dtype=np.int32)[:, None]
            begun: Any = np.maximum.accumulate(np.where(ends, steps, -self._next_ages), axis=0)
            ages: Any = np.concatenate([self._next_ages[None], steps - begun])
        else:
            steps = torch.arange(1, num_rows + 1, dtype=torch.int32, device=ends.device).unsqueeze(1)
            begun = torch.where(ends, steps, -self._next_ages).cummax(0).values
            ages = torch.cat([self._next_ages.unsqueeze(0), steps - begun])
        for slots, rows in ring.spans(num_rows):
            self._ages[slots] = ages[rows]
        self._next_ages[:] = ages[-1].clip(max=_MAX_AGE)

    def clear(self) -> None:
        """Forget every row."""
        self.next_ages.zero_()
        if self.segments is not None:
            self.segments.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Give the ages of live rows, or of the rows that come next."""
        found = self.ages.view(-1).index_select(0, self._index(lane, row_id).flatten()).view(row_id.shape)
        if self.ring.device.type == "cpu" and not bool((row_id >= self.ring.total).any()):
            return found
        return torch.where(row_id >= self.ring.total, self.next_ages[lane], found)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Tell which live rows are the last of their trajectory."""
        return self.age(lane, row_id + 1) == 0

    def rule(self, length: int) -> Rule:
        """Say when a window of live rows is inside one trajectory."""
        ages = self.ages.view(-1)

        def is_inside(lane: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return ages.index_select(0, self._index(lane, last)) >= length - 1

        return is_inside

    def draw(
        self, num_draws: int, length: int, generator: torch.Generator, rule: Rule | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw windows uniformly over all that are valid, with replacement.

        Args:
            num_draws: How many.
            length: Rows of a window; its first row must be live.
            generator: Draws the candidates; on the ring's device.
            rule: When a window is valid; None if inside one trajectory.

        Returns:
            (lane, id of the last row), `[num_draws]` int64 each; None if no window is valid.
        """
        accept = self._accept_inside(length) if rule is None else self._accept_by(length, rule)
        drawn = self.rejection.draw(num_draws, self._num_windows(length), accept, generator)
        return None if drawn is None else self._decode(drawn, length)

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw windows inside one trajectory as `draw` does; say where in the ring's memory their first rows lie."""
        drawn = self.rejection.draw(num_draws, self._num_windows(length), self._accept_inside(length), generator)
        if drawn is None:
            return None
        ring, lanes = self.ring, self.ring.num_lanes
        if lanes == 1:
            return tensor_of(ring.place(None, drawn + ring.oldest))
        row = drawn // lanes
        return tensor_of(ring.place(drawn - row * lanes, row + ring.oldest))

    def draw_by_trajectory(
        self, num_draws: int, length: int, generator: torch.Generator, goes_on: Rule | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw a trajectory uniformly, over those whose live part has `length` rows, then a window of it uniformly.

        `goes_on` says of which ended trajectories windows may reach one row beyond the last, as if there was one.
        """
        assert self.segments is not None, "created with keeps_segments=True"
        ring, (lane, last, num_rows) = self.ring, self.segments.listed()
        num_ended = len(lane)
        if not num_ended:  # a row that no candidate means, so that there is one to look up
            lane = last = num_rows = torch.zeros(1, dtype=torch.int64, device=ring.device)

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Give the lane, last row and number of rows of trajectories: those that ended, then one of each lane."""
            is_open, place = candidate >= num_ended, candidate.clamp(max=max(num_ended, 1) - 1)
            of_lane = (candidate - num_ended).clamp(min=0)
            more = 0 if goes_on is None else (~is_open & goes_on(lane[place], last[place])).long()
            its_lane = torch.where(is_open, of_lane, lane[place])
            its_last = torch.where(is_open, ring.total - 1, last[place])
            its_rows = torch.where(is_open, self.next_ages[of_lane].long(), num_rows[place])
            return its_lane, its_last + more, torch.minimum(its_rows, its_last - ring.oldest + 1) + more

        candidates = num_ended + ring.num_lanes

        def accept(candidate: Any) -> Any:
            return candidate[own(decode(tensor_of(candidate))[2] >= length)]

        drawn = self.rejection.draw(num_draws, candidates, accept, generator)
        if drawn is None:
            return None
        its_lane, its_last, its_rows = decode(tensor_of(drawn))
        # The remainder of 62 random bits is uniform to one part in 2 ** 62 / choices.
        bits = torch.randint(1 << 62, (num_draws,), generator=generator, device=ring.device)
        return its_lane, its_last - bits % (its_rows - length + 1)

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """List every valid window, lane by lane, oldest first: (lane, id of the last row)."""
        listed = _list(self._num_windows(length), self._accept_inside(length), self.ring.device)
        lane, last = self._decode(listed, length)
        order = lane.argsort(stable=True)
        return lane[order], last[order]

    def _index(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Say where the ages of rows are."""
        slot: torch.Tensor = self.ring.slot(row_id)
        return slot if self.ring.num_lanes == 1 else slot.mul_(self.ring.num_lanes).add_(lane)

    def _num_windows(self, length: int) -> int:
        """Count the windows of live rows, which are the candidates: row by row, and the lanes of each."""
        return max(self.ring.num_live - length + 1, 0) * self.ring.num_lanes

    def _decode(self, candidate: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the lane and the last row of candidates."""
        candidate, first = tensor_of(candidate), self.ring.oldest + length - 1
        if self.ring.num_lanes == 1:
            return torch.zeros_like(candidate), candidate + first
        row = torch.div(candidate, self.ring.num_lanes, rounding_mode="floor")
        return candidate - row * self.ring.num_lanes, row.add_(first)

    def _accept_by(self, length: int, rule: Rule) -> _Accept:
        return lambda candidate: candidate[own(rule(*self._decode(candidate, length)))]

    def _accept_inside(self, length: int) -> _Accept:
        """Accept windows inside one trajectory, by the ages of their last rows, which lie as candidates are counted."""
        first, back = self.ring.slot(self.ring.oldest + length - 1) * self.ring.num_lanes, length - 1
        ages = self._ages.reshape(-1)
        if isinstance(ages, torch.Tensor):
            return lambda candidate: candidate[ages[(candidate + first) % len(ages)] >= back]
        return lambda candidate: candidate.compress(ages.take(candidate + first, mode="wrap") >= back)


class Rejection:
    """Draw by proposing and accepting.

    Attributes:
        share: How many were accepted lately, to propose about enough next time. Saved with the random
            state, as both say which numbers come next.
    """

    def __init__(self) -> None:
        self.share = 0.9

    def draw(self, num_draws: int, num_candidates: int, accept: _Accept, generator: torch.Generator) -> Any:
        """Draw uniformly over the accepted candidates of `range(num_candidates)`; None if there are none."""
        if not num_candidates:
            return None
        num_proposed, missing = 0, num_draws
        found: list[Any] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # Four standard deviations more than are enough on average: a second round costs more than they do.
            size = min(int((missing + 4 * (missing * (1 - self.share)) ** 0.5) / self.share) + 8, _MAX_CANDIDATES)
            accepted = accept(own(uniform(num_candidates, size, generator)))
            self.share = max(0.8 * self.share + 0.2 * accepted.shape[0] / size, 1e-3)
            num_proposed += size
            found.append(accepted[:missing])
            missing -= found[-1].shape[0]
            if not missing:
                return found[0] if len(found) == 1 else _joined(found)
        listed = _list(num_candidates, accept, generator.device)
        if not len(listed):
            return None
        found.append(listed[own(uniform(len(listed), missing, generator))])
        return _joined(found)


def _list(num_candidates: int, accept: _Accept, device: torch.device) -> Any:
    """List every accepted candidate in order."""
    found = [own(torch.empty(0, dtype=torch.int64, device=device))]
    for start in range(0, num_candidates, _NUM_LISTED):
        stop = min(start + _NUM_LISTED, num_candidates)
        found.append(accept(own(torch.arange(start, stop, device=device))))
    return _joined(found)


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


class Segments:
    """The ended trajectories that still have live rows, oldest end first.

    They are noted as they end and forgotten as their last row is overwritten, so that nothing is searched for.

    Args:
        ring: The ring.
    """

    def __init__(self, ring: RingStore) -> None:
        self._ring = ring
        #: Lane, id of the last row, number of rows; `[3, room]`, of which `_first` to `_last` count.
        self._rows = np.zeros((3, 64), np.int64)
        self._first, self._last = 0, 0

    def note(self, ends: npt.NDArray[np.bool_], next_ages: torch.Tensor, total: int) -> None:
        """Note the ends `[n, lanes]` of rows that are about to be written at `total`."""
        step, lane = np.nonzero(ends)
        if not len(step):
            return
        # Sorted by lane, the previous end of each lane stands before it; the first counts from its lane's age.
        order = np.lexsort((step, lane))
        step, lane = step[order], lane[order]
        is_first = np.append(True, lane[1:] != lane[:-1])
        previous = np.where(is_first, -1 - next_ages.cpu().numpy().astype(np.int64)[lane], np.append(0, step[:-1]))
        rows = np.stack([lane, step + total, step - previous])
        self._append(rows[:, np.argsort(step, kind="stable")])

    def clear(self) -> None:
        """Forget every trajectory."""
        self._first, self._last = 0, 0

    def listed(self) -> torch.Tensor:
        """Give those with live rows, `[3, num]` int64 on the ring's device: lane, last row, number of rows."""
        self._drop_dead()
        return torch.from_numpy(self._rows[:, self._first : self._last]).to(self._ring.device)

    def _append(self, rows: npt.NDArray[np.int64]) -> None:
        num_new = rows.shape[1]
        if self._last + num_new > self._rows.shape[1]:
            self._drop_dead()
            kept = self._rows[:, self._first : self._last]
            room = np.zeros((3, kept.shape[1] + 2 * num_new), np.int64)
            self._rows = np.concatenate([kept, room], axis=1)
            self._first, self._last = 0, kept.shape[1]
        self._rows[:, self._last : self._last + num_new] = rows
        self._last += num_new

    def _drop_dead(self) -> None:
        ends = self._rows[1, self._first : self._last]
        self._first += int(np.searchsorted(ends, self._ring.oldest))
