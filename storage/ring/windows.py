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

from collections.abc import Callable, Iterable, Mapping
from math import isqrt
from typing import Any

import numpy as np
import torch

from ..core.fields import Field, Schema, signed
from ..core.memory import filled, lasting, own, tensor_of
from ..core.records import Rows
from ..core.samplers import below, fill_uniform, uniform
from .ends import EndedRows
from .ring import RingStore

#: (lane, row id of the window's last row) -> whether the window is valid.
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Candidates, as `own` gives them -> those that are accepted, in their order.
_Accept = Callable[[Any], Any]
#: Candidates that are proposed in vain before all are listed: in all, and per draw.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: Shares are counted in units of 2**-16, so that every processor proposes equally many; the least one is above 0.001.
_WHOLE_SHARE, _LEAST_SHARE = 1 << 16, 66
#: Candidates that are listed at once, which bounds the memory of listing.
_NUM_LISTED = 1 << 20
#: For how many numbers of candidates memory is kept.
_MAX_MEMORIES = 16
#: Ages stop here, far above any window, so that they never overflow.
_MAX_AGE = 1 << 29
#: What is known of an ended trajectory.
_SEGMENT = Schema([Field("num_rows", (), "int64")])


class Boundaries:
    """Ages of the rows of a ring, and where trajectories ended.

    Args:
        ring: The ring, whose `total` must be what it was when these rows were noted.
        keeps_segments: Whether ended trajectories are listed, for draws by trajectory. On CUDA that
            costs one synchronization per write.

    Attributes:
        ages: `[num_slots, num_lanes]` int32; time first, so that a step of many lanes is written in one piece.
        next_ages: `[num_lanes]` int32, age of each lane's next row; 0 if the last written row ended a trajectory.
        share: How many candidates were accepted lately, to propose about enough next time. Saved with the random
            state, as both say which numbers come next.
        finals: What was observed after the last rows of trajectories, if that was ever given.
    """

    @lasting
    def __init__(self, ring: RingStore, keeps_segments: bool = False) -> None:
        self.ring = ring
        self.ages = filled((ring.num_slots, ring.num_lanes), 0, torch.int32, ring.device)
        self.next_ages = torch.zeros(ring.num_lanes, dtype=torch.int32, device=ring.device)
        self.share = 0.9
        self.finals: EndedRows | None = None
        self._segments = EndedRows(ring, _SEGMENT) if keeps_segments else None
        #: By size, of a few sizes.
        self._memories: dict[int, torch.Tensor] = {}
        # As arrays on the CPU, where numpy takes a third of the time for few rows.
        self._ages, self._next_ages = own(self.ages), own(self.next_ages)
        self._flat_ages = self._ages.reshape(-1)

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for what is known of rows."""
        return self.ages.nbytes + (0 if self.finals is None else self.finals.num_bytes)

    def note(self, ends: Any, final: Rows | None = None) -> None:
        """Note rows that are about to be written: `ends` is `[n, lanes]` bool. Call it before the ring's `write`.

        Args:
            ends: A tensor, or, if the ring is on the CPU, an array, which with one lane may be `[n]`.
            final: Observations after the rows, as many; of those that end a trajectory they are kept.
        """
        ring, num_rows = self.ring, len(ends)
        if not num_rows:
            return
        if isinstance(ends, torch.Tensor):
            ends = own(ends.to(ring.device))
        if final is not None:
            self._note_final(tensor_of(ends), final)
        if num_rows == 1:
            slot, ended = ring.total % ring.num_slots, ends.reshape(-1)
            if self._segments is not None:
                self._note_segments(self._segments, ended[None], self._next_ages[None])
            self._ages[slot] = self._next_ages
            self._next_ages += 1
            self._next_ages[ended] = 0
            if not slot:
                self.next_ages.clamp_(max=_MAX_AGE)
            return
        ends = ends.reshape((num_rows, ring.num_lanes))
        # The step since which a lane's trajectory lasts: below 0 where it began before these rows.
        ages: Any
        if isinstance(ends, np.ndarray):
            steps = np.arange(1, num_rows + 1, dtype=np.int32)[:, None]
            begun: Any = np.maximum.accumulate(np.where(ends, steps, -self._next_ages), axis=0)
            ages = np.concatenate([self._next_ages[None], steps - begun])
        else:
            counted = torch.arange(1, num_rows + 1, dtype=torch.int32, device=ends.device).unsqueeze(1)
            begun = torch.where(ends, counted, -self._next_ages).cummax(0).values
            ages = torch.cat([self._next_ages.unsqueeze(0), counted - begun])
        if self._segments is not None:
            self._note_segments(self._segments, ends, ages)
        for slots, rows in ring.spans(num_rows):
            self._ages[slots] = ages[rows]
        self._next_ages[:] = ages[-1].clip(max=_MAX_AGE)

    def clear(self) -> None:
        """Forget every row."""
        self.next_ages.zero_()
        for kept in (self._segments, self.finals):
            if kept is not None:
                kept.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Give the ages of live rows, or of the rows that come next."""
        index = row_id % self.ring.num_slots * self.ring.num_lanes + lane
        found = self.ages.view(-1).index_select(0, index.flatten()).view(row_id.shape)
        if self.ring.device.type == "cpu" and not bool((row_id >= self.ring.total).any()):
            return found
        return torch.where(row_id >= self.ring.total, self.next_ages[lane], found)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Tell which live rows are the last of their trajectory."""
        return self.age(lane, row_id + 1) == 0

    def finals_of(self, names: Iterable[str]) -> EndedRows | None:
        """Give the final observations if they have all of some fields."""
        return self.finals if self.finals is not None and all(name in self.finals.schema for name in names) else None

    def may_follow(self, names: Iterable[str], is_marked: bool, lane: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Say of rows that ended a trajectory whether fields are given behind them: observations, or a mark."""
        finals = self.finals_of(names)
        if is_marked or finals is None:
            return torch.full_like(lane, is_marked, dtype=torch.bool)
        return finals.find(lane, last)[0]

    def put_finals(
        self, following: Mapping[str, torch.Tensor], lane: torch.Tensor, last: torch.Tensor, ended: torch.Tensor
    ) -> torch.Tensor:
        """Where a trajectory ended, replace what follows: by its final observation, else by the last row itself.

        Args:
            following: `[n, *event]` per field, one row after each of `last`.
            lane, last: `[n]`, the last rows.
            ended: `[n]` bool, which of them ended a trajectory.

        Returns:
            `[n]` bool, of which rows now a following one is known.
        """
        finals, follows = self.finals_of(following), ~ended
        rows = ended.nonzero().squeeze(1)
        if not len(rows):
            return follows
        lane, last = lane[rows], last[rows]
        places = self.ring.place(lane, last)
        if finals is not None:
            is_known, at = finals.find(lane, last)
            follows[rows] = is_known
        for name, leaf in following.items():
            new = self.ring.column(name).index_select(0, places)
            if finals is not None:
                signed(new)[is_known] = signed(finals.take(name, at[is_known]))
            signed(leaf)[rows] = signed(new)
        return follows

    def draw(
        self, num_draws: int, length: int, generator: torch.Generator, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw windows uniformly over all that are valid, with replacement.

        Args:
            num_draws: How many.
            length: Rows of a window; its first row must be live.
            generator: Draws the candidates; on the ring's device.
            rule: When a window is valid.

        Returns:
            (lane, id of the last row), `[num_draws]` int64 each; None if no window is valid.
        """

        def accept(found: Any) -> Any:
            return found[own(rule(*self._decode(tensor_of(found), length)))]

        drawn = self._reject(num_draws, self._candidates(length), accept, generator)
        return None if drawn is None else self._decode(tensor_of(drawn), length)

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> Any:
        """Draw windows inside one trajectory as `draw` does; say where in the ring's memory their first rows lie.

        They come as `own` gives them.
        """
        drawn = self._reject(num_draws, self._candidates(length), self._accept_inside(length), generator)
        if drawn is None:
            return None
        lanes = self.ring.num_lanes
        row = drawn if lanes == 1 else drawn // lanes
        return self.ring.place(drawn - row * lanes if lanes > 1 else None, row - (length - 1))

    def draw_by_trajectory(
        self, num_draws: int, length: int, generator: torch.Generator, goes_on: Rule | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw a trajectory uniformly, over those whose live part has `length` rows, then a window of it uniformly.

        `goes_on` says of which ended trajectories windows may reach one row beyond the last, as if there was one.
        """
        assert self._segments is not None, "created with keeps_segments=True"
        ring, (lane, last, columns) = self.ring, self._segments.live()
        num_rows, num_ended = columns["num_rows"], len(lane)
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

        def accept(candidate: Any) -> Any:
            return candidate[own(decode(tensor_of(candidate))[2] >= length)]

        drawn = self._reject(num_draws, (0, num_ended + ring.num_lanes), accept, generator)
        if drawn is None:
            return None
        its_lane, its_last, its_rows = decode(tensor_of(drawn))
        return its_lane, its_last - below(its_rows - length + 1, generator)

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """List every valid window, lane by lane, oldest first: (lane, id of the last row)."""
        listed = _list(self._candidates(length), self._accept_inside(length), self.ring.device)
        lane, last = self._decode(tensor_of(listed), length)
        order = lane.argsort(stable=True)
        return lane[order], last[order]

    def _note_segments(self, segments: EndedRows, ends: Any, ages: Any) -> None:
        if ends.any():
            step, lane = tensor_of(ends).nonzero(as_tuple=True)
            segments.append(lane, step + self.ring.total, {"num_rows": tensor_of(ages)[step, lane].long() + 1})

    def _note_final(self, ends: torch.Tensor, final: Rows) -> None:
        step, lane = ends.nonzero(as_tuple=True)
        if len(step):
            if self.finals is None:
                self.finals = EndedRows(self.ring, final.schema)
            leaves = zip(final.schema, final.tensors, strict=True)
            ended = {name: leaf[step.to(leaf.device), lane.to(leaf.device)] for name, leaf in leaves}
            self.finals.append(lane, step + self.ring.total, ended)

    def _candidates(self, length: int) -> tuple[int, int]:
        """Give the first candidate, and how many there are: windows of live rows, row by row, and the lanes of each.

        A window's candidate is where the age of its last row lies, on from the oldest window's across the ring's end.
        """
        ring = self.ring
        first = (ring.oldest + length - 1) % ring.num_slots
        return first * ring.num_lanes, max(ring.num_live - length + 1, 0) * ring.num_lanes

    def _decode(self, candidate: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the lane and the last row of candidates."""
        ring, first = self.ring, self.ring.oldest + length - 1
        row = torch.div(candidate, ring.num_lanes, rounding_mode="floor")
        return candidate - row * ring.num_lanes, row + (first - first % ring.num_slots)

    def _accept_inside(self, length: int) -> _Accept:
        """Accept windows inside one trajectory."""
        ages, back = self._flat_ages, length - 1
        if isinstance(ages, torch.Tensor):
            return lambda candidate: candidate[ages[candidate % len(ages)] >= back]
        return lambda candidate: candidate[ages.take(candidate, mode="wrap") >= back]

    def _reject(self, num_draws: int, candidates: tuple[int, int], accept: _Accept, generator: torch.Generator) -> Any:
        """Draw uniformly over the accepted ones of some candidates (the first, how many); None if there are none."""
        first, num_candidates = candidates
        if not num_candidates:
            return None
        num_proposed, missing = 0, num_draws
        found: list[Any] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # Four standard deviations more than are enough on average: a second round costs more than they do.
            share = max(1, int(self.share * _WHOLE_SHARE))
            num_extra = isqrt(16 * missing * (_WHOLE_SHARE - share) // _WHOLE_SHARE)
            size = ((missing + num_extra) * _WHOLE_SHARE // share + 8) // 8 * 8
            size = min(size, _MAX_CANDIDATES)
            memory = self._memories.get(size)
            if memory is None:
                memory = self._memory_for(size)
            accepted = accept(own(fill_uniform(memory, num_candidates, generator, first)))
            num_accepted = len(accepted)
            share = (4 * share + num_accepted * _WHOLE_SHARE // size) // 5
            self.share = max(share, _LEAST_SHARE) / _WHOLE_SHARE
            found.append(accepted[:missing])
            if num_accepted >= missing:
                return found[0] if len(found) == 1 else _joined(found)
            num_proposed += size
            missing -= num_accepted
        listed = _list(candidates, accept, self.ring.device)
        if not len(listed):
            return None
        found.append(listed[own(uniform(len(listed), missing, generator))])
        return _joined(found)

    @lasting
    def _memory_for(self, size: int) -> torch.Tensor:
        """Make memory for candidates, which is kept; fresh memory takes 2 of 24 us of 32 transitions."""
        if len(self._memories) >= _MAX_MEMORIES:
            self._memories.clear()
        found = self._memories[size] = torch.empty(size, dtype=torch.int64, device=self.ring.device)
        return found


def _list(candidates: tuple[int, int], accept: _Accept, device: torch.device) -> Any:
    """List every accepted candidate in order."""
    found = [own(torch.empty(0, dtype=torch.int64, device=device))]
    start, end = candidates[0], sum(candidates)
    while start < end:
        stop = min(start + _NUM_LISTED, end)
        found.append(accept(own(torch.arange(start, stop, device=device))))
        start = stop
    return _joined(found)


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)
