"""Valid windows of a ring: the age of each row, and exact draws of windows inside one trajectory.

The age of a row is the number of rows since its trajectory began. A window of L rows that ends at
row e is valid if and only if `age[e] >= L - 1` and its first row is live. No list of boundaries is
searched, so the cost of a write or a draw does not depend on the size of the ring.

Draws use rejection sampling. Candidates are uniform over a superset of the valid windows, and the
first accepted candidates are the result. Accepted candidates are independent and uniform over the
valid windows at any acceptance rate; the rate only determines how many candidates are proposed. If
almost no candidate is accepted, all valid windows are listed instead, with the same distribution.

On a GPU the host does not wait for the number of accepted candidates. It proposes so many that too
few are accepted once in 10**9 draws, and reads the number at a later draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.deferred import DeferredErrors
from ..core.fields import Field, Schema, signed
from ..core.memory import add_multiple, filled, lasting, library, own, tensor_of
from ..core.random_indices import below, fill_uniform, random_bits, uniform
from ..core.records import Rows
from ..errors import UsageError
from .ring_store import RingStore, spans
from .trajectory_ends import EndedRows

#: Function of candidates that returns whether each is accepted, and their codes (`_codes`) or None.
_Judge = Callable[[Any], tuple[Any, Any]]
#: Function of a field name and row numbers (None for all) that returns `[n, *event]`.
_RowsOf = Callable[[str, torch.Tensor | None], torch.Tensor]
#: Function of a number and a generator that returns that number of candidates.
_Propose = Callable[[int, torch.Generator], Any]
#: Maximum number of proposed candidates, per call and per draw. After that, all valid candidates
#: are listed.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: Number of units of the accepted share 1, and the least share in units (above 0.001). The integer
#: share makes the number of candidates equal on every processor.
_WHOLE_SHARE, _LEAST_SHARE = 1 << 16, 66
#: Extra candidates of draws without a wait, in standard deviations.
_NUM_DEVIATIONS = 6
#: Candidates per step of `_list`, which limits its memory.
_NUM_LISTED = 1 << 20
#: Maximum number of kept memories of candidates, one per number of candidates.
_MAX_MEMORIES = 16
#: Maximum number of kinds of draws with a kept share of accepted candidates.
_MAX_KINDS = 64
#: Maximum age: far above the length of any window, without overflow of int32.
_MAX_AGE = 1 << 29
#: A number below every entry of `ages`, the negative ones included.
_LEAST_AGE = -(1 << 31)
#: Number of lower bits of a code, which contain the slot of a final observation. The upper bits
#: contain a number of rows.
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
#: Fields that are kept per ended trajectory.
_SEGMENT = Schema([Field("num_rows", (), "int64")])


@dataclass(frozen=True)
class Extent:
    """Rows that a draw needs around the row that it draws.

    Attributes:
        num_before: Number of live rows of the same trajectory before the drawn row.
        num_frames: Number of frames up to the drawn row. Those within its trajectory must be live.
        num_after: Number of rows after the drawn row.
        ends: Whether the trajectory may end within the `num_after` rows: "never", only if its final
            observation is "known", or "always".
    """

    num_before: int = 0
    num_frames: int = 1
    num_after: int = 0
    ends: str = "never"


class Drawn(NamedTuple):
    """Drawn rows, and the number of rows that follow them.

    Attributes:
        lane, row: `[n]` int64, lanes and row ids.
        num_ahead: Later rows of the trajectory, at most the requested number: `[n]` int64, or one
            number for all rows.
        ended: `[n]` bool, whether the trajectory ends within the requested rows; None if none ends.
        final: `[n]` int64, slot of the final observation in `EndedRows`, 0 if unknown; valid only
            where `ended`.
    """

    lane: torch.Tensor
    row: torch.Tensor
    num_ahead: Any = 0
    ended: torch.Tensor | None = None
    final: torch.Tensor | None = None


class _Kind:
    """Statistics of one kind of draws on a device: the share of accepted candidates."""

    def __init__(self, name: Any) -> None:
        #: Key of the kind in `Boundaries`.
        self.name = name
        self.share = 0.0
        #: Number of candidates from which the share was computed. With 0, the next draw waits for
        #: the device.
        self.num_judged = 0
        #: The numbers 0, 1, ..., one per draw of the first call. That call waits for the device, so
        #: that all streams may use the tensor afterwards.
        self.numbers: torch.Tensor | None = None

    def note(self, num_accepted: int, num_judged: int) -> None:
        """Update the share with the number of accepted candidates of a draw."""
        share = num_accepted / num_judged
        self.share = min(share, 0.8 * self.share + 0.2 * share) if self.num_judged else share
        self.num_judged = num_judged

    def num_candidates(self, num_draws: int) -> int:
        """Return a number of candidates of which enough are accepted, except once in 10**9 draws.

        Returns 0 if the share of accepted candidates is unknown.
        """
        share = self.share
        num = self.num_judged
        z = _NUM_DEVIATIONS
        if not num:
            return 0
        # Wilson's lower bound of the share, minus 5 % for rows written since it was measured.
        middle = share + z * z / (2 * num)
        reach = z * (share * (1 - share) / num + (z / (2 * num)) ** 2) ** 0.5
        least = 0.95 * (middle - reach) / (1 + z * z / num)
        if least <= 1e-6:
            return 0
        num_more = z * (num_draws * (1 - least)) ** 0.5
        return int((num_draws + num_more) / least / 64 + 1) * 64


class Boundaries:
    """Ages of the rows of a ring, and where trajectories ended.

    Args:
        ring: Ring of the rows. `note` must be called before each write to the ring.
        keeps_segments: Whether ended trajectories are listed, for draws by trajectory.
        deferred: Receives the errors of draws on a device.

    Attributes:
        ages: `[num_slots + 1, num_lanes]` int32; time first, so that a step of many lanes is
            written in one piece. The age of row i is at `i % (num_slots + 1)`. The additional entry
            is the age of the next row to be written. The first row of a trajectory has age 0, or
            minus the slot of the final observation of the previous trajectory.
        share: Share of candidates that recent draws accepted. It determines how many candidates a
            draw proposes. It is saved, since the next draws depend on the share and the random
            state.
        finals: Final observations of trajectories; None until `note` receives the first one.
        num_lost_finals: Number of final observations that were overwritten before their rows; on
            the CPU always 0.
        num_short_draws: Number of draws on a device that accepted too few candidates and repeated
            some.
    """

    @lasting
    def __init__(
        self,
        ring: RingStore,
        keeps_segments: bool = False,
        deferred: DeferredErrors | None = None,
    ) -> None:
        self.ring = ring
        self.deferred = DeferredErrors() if deferred is None else deferred
        self._num_slots = ring.num_slots + 1
        #: All ages, and a last entry that is the target of writes that must change no age.
        self._all_ages = filled(
            (self._num_slots * ring.num_lanes + 1,), 0, torch.int32, ring.device
        )
        self.ages = self._all_ages[:-1].view(self._num_slots, ring.num_lanes)
        self.share = 0.9
        self.finals: EndedRows | None = None
        self.num_lost_finals: torch.Tensor | int = 0
        self.num_short_draws = 0
        self._segments = EndedRows(ring, _SEGMENT) if keeps_segments else None
        self._is_on_cpu = ring.device.type == "cpu"
        self._library: Any = library(ring.device)
        #: Memory for candidates by the number of candidates.
        self._memories: dict[int, torch.Tensor] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._steps: dict[int, tuple[Any, Any]] = {}
        # On the CPU these are arrays, since numpy takes a third of the time of torch for few rows.
        self._ages = own(self.ages)
        self._flat_ages = own(self._all_ages[:-1])

    @property
    def next_ages(self) -> torch.Tensor:
        """Ages of the next rows to be written, `[num_lanes]` int32, a view."""
        return self.ages[self.ring.total % self._num_slots]

    @property
    def num_bytes(self) -> int:
        """Reserved memory of ages, final observations and listed trajectories, in bytes."""
        return self.ages.nbytes + (0 if self.finals is None else self.finals.num_bytes)

    def note(self, ends: Any, final: Rows | None = None) -> None:
        """Record the ends of new rows. Call this method before `write` of the ring.

        Args:
            ends: `[n, lanes]` bool, whether each row ends a trajectory. An array is allowed if the
                ring is on the CPU; with one lane its shape may be `[n]`.
            final: Observations after the rows, one per row. Only those after ends are kept.
        """
        ring = self.ring
        num_rows = len(ends)
        if not num_rows:
            return
        if isinstance(ends, torch.Tensor):
            ends = own(ends.to(ring.device))
        ends = ends.reshape((num_rows, ring.num_lanes))
        begins = 0 if final is None else self._note_final(ends, final)
        slot = ring.total % self._num_slots
        first_ages = self._ages[slot]
        if self.finals is not None:
            first_ages = first_ages * (first_ages > 0)
        if num_rows == 1:
            ages: Any = first_ages[None]
            next_slot = slot + 1 if slot < ring.num_slots else 0
            if final is None:
                self._library.add(first_ages, 1, out=self._ages[next_slot])
                self._ages[next_slot][ends[0]] = 0
            else:
                self._ages[next_slot] = self._library.where(ends[0], begins, first_ages + 1)
        else:
            ages, later = self._later_ages(ends, first_ages)
            if final is not None:
                later = self._library.where(ends, begins, later)
            for slots, rows in spans(ring.total + 1, num_rows, self._num_slots):
                self._ages[slots] = later[rows]
        if self._segments is not None:
            self._note_segments(self._segments, ends, ages)
        if slot + num_rows >= self._num_slots:
            self.ages[(slot + num_rows) % self._num_slots].clamp_(max=_MAX_AGE)

    def clear(self) -> None:
        """Remove all rows."""
        self.ages[0].zero_()
        self._kinds.clear()
        for kept in (self._segments, self.finals):
            if kept is not None:
                kept.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return the age of each row `row_id` of `lane`, in rows since its trajectory began.

        A row is live, or is the next row that will be written to its lane.
        """
        index = row_id % self._num_slots * self.ring.num_lanes + lane
        ages = self._all_ages.take(index)
        return ages if self.finals is None else ages.clamp(min=0)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return whether each live row is the last of its trajectory."""
        return self.age(lane, row_id + 1) == 0

    def finals_of(self, names: Iterable[str]) -> EndedRows | None:
        """Return the final observations if they have all fields in `names`, else None."""
        return (
            self.finals
            if self.finals is not None and all(name in self.finals.schema for name in names)
            else None
        )

    def ends_for(self, names: Iterable[str], is_marked: bool) -> str:
        """Return `Extent.ends` for draws with the fields `names` of the following row.

        `is_marked`: Rows without a following row are drawn and marked.
        """
        if is_marked:
            return "always"
        return "never" if self.finals_of(names) is None else "known"

    def restore_finals(
        self, schema: Schema, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]
    ) -> None:
        """Restore the final observations of live rows from the result of `EndedRows.live`.

        Raises:
            SchemaError: The keys or fields are not a valid result of `EndedRows.live`.
        """
        finals = EndedRows(self.ring, schema)
        self._write_places(finals.restore(keys, leaves))
        self.finals = finals

    def put_finals(
        self,
        following: Mapping[str, torch.Tensor],
        last_rows: _RowsOf | None,
        drawn: Drawn,
        is_marked: bool,
    ) -> torch.Tensor | None:
        """Replace the rows after ends of trajectories by final observations, or else by last rows.

        Args:
            following: `[n, *event]` per field, the rows after the drawn rows; changed in place.
            last_rows: Function that returns a field of the last rows. None: `following` already has
                the last row at each end.
            drawn: The drawn rows.
            is_marked: Whether ends without a final observation may be among the drawn rows.

        Returns:
            `[n]` bool, whether the following row is known; None if all are known.
        """
        finals = self.finals_of(following)
        ended = drawn.ended
        final = drawn.final
        if ended is None or final is None:
            return None
        is_known = ended if not is_marked else ended & (final > 0)
        rows_ended = ended.nonzero().squeeze(1) if self._is_on_cpu else None
        rows_known = is_known.nonzero().squeeze(1) if self._is_on_cpu else None
        for name, leaf in following.items():
            if last_rows is not None and (is_marked or finals is None):
                _replace(leaf, ended, rows_ended, last_rows(name, rows_ended))
            if finals is not None:
                places = final if rows_known is None else final[rows_known]
                _replace(leaf, is_known, rows_known, finals.take(name, places))
        if not is_marked:
            return None
        return ~ended if finals is None else torch.where(ended, is_known, True)

    def draw(self, num_draws: int, extent: Extent, generator: torch.Generator) -> Drawn | None:
        """Draw rows with replacement, uniformly over all rows that have the `extent` around them.

        Args:
            num_draws: Number of draws.
            extent: Rows that must exist around a drawn row.
            generator: Random generator on the device of the ring.

        Returns:
            The rows; None if no row is valid.
        """
        length = extent.num_before + 1
        candidates = self._candidates(length)
        drawn, codes = self._reject(
            num_draws, candidates, self._judge(extent, candidates), generator, extent
        )
        if drawn is None:
            return None
        lane, row = self._decode(tensor_of(drawn), length)
        if codes is None:
            return Drawn(lane, row, extent.num_after)
        return _with_codes(lane, row, tensor_of(codes), extent.num_after)

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> Any:
        """Draw windows uniformly. Return the memory positions of first rows, an array or a tensor.

        Every window is inside one trajectory. Returns None if no window is valid.
        """
        drawn, _ = self._reject(
            num_draws,
            self._candidates(length),
            self._judge_inside(length),
            generator,
            ("windows", length),
        )
        if drawn is None:
            return None
        lanes = self.ring.num_lanes
        shift = self._shift(length)
        row = drawn if lanes == 1 else drawn // lanes
        lane = add_multiple(drawn, row, -lanes) if lanes > 1 else None
        return self.ring.place(lane, row + (shift - (length - 1)))

    def draw_by_trajectory(
        self, num_draws: int, length: int, generator: torch.Generator, ends: str = "never"
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw trajectories uniformly, then a window of `length` rows uniformly in each.

        Only trajectories with at least `length` live rows are drawn. `ends` states in which ended
        trajectories a window may reach one row beyond the last row; see `Extent`. Returns (lane, id
        of the last row), or None if no trajectory is valid.
        """
        assert self._segments is not None, "created with keeps_segments=True"
        ring = self.ring
        segments = self._segments
        num_ended = segments.num_live()

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Return (lane, last row, number of rows) of candidates.

            The candidates are the ended trajectories, then the open trajectory of each lane.
            """
            is_open = candidate >= num_ended
            place = segments.places(num_ended, torch.where(is_open, 0, candidate))
            lane, last = segments.named(place)
            lane = torch.where(is_open, candidate - num_ended, lane)
            last = torch.where(is_open, ring.total - 1, last)
            num_rows = torch.where(
                is_open, self.age(lane, last + 1).long(), segments.take("num_rows", place)
            )
            num_rows = torch.minimum(num_rows, last - ring.oldest + 1)
            if ends == "never":
                return lane, last, num_rows
            goes_on = ~is_open
            if ends == "known":
                goes_on = goes_on & (self._marks(lane, last) < 0)
            return lane, last + goes_on, num_rows + goes_on

        def judge(candidate: Any) -> tuple[Any, Any]:
            return own(decode(tensor_of(candidate))[2] >= length), None

        def on_device(num: int, generator: Any) -> Any:
            return random_bits(num, generator) % (num_ended + ring.num_lanes)

        candidates: Any = (0, num_ended + ring.num_lanes) if self._is_on_cpu else on_device
        drawn, _ = self._reject(
            num_draws, candidates, judge, generator, ("trajectories", length, ends)
        )
        if drawn is None:
            return None
        lane, last, num_rows = decode(tensor_of(drawn))
        return lane, last - below(num_rows - length + 1, generator)

    def follow(self, lane: torch.Tensor, row: torch.Tensor) -> Drawn:
        """Return a `Drawn` of live rows: `num_ahead` is 1 if a row has a next row, else 0.

        The next row belongs to the same trajectory.
        """
        marks = self._marks(lane, row)
        ended = marks <= 0
        return Drawn(lane, row, (~ended).long(), ended, (-marks.long()).clamp_(min=0))

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lane and the id of the last row of every valid window, as a pair of tensors.

        The windows are sorted by lane, and then from the oldest to the newest.
        """
        listed, _ = _list(self._candidates(length), self._judge_inside(length), self.ring.device)
        lane, last = self._decode(tensor_of(listed), length)
        order = lane.argsort(stable=True)
        return lane[order], last[order]

    # Writing.

    def _later_ages(self, ends: Any, first_ages: Any) -> tuple[Any, Any]:
        """Return a pair: the ages of new rows, and the ages of the rows one step later.

        `ends` is `[n, lanes]`: whether each new row ends a trajectory. `first_ages` are the ages of
        the first new rows, `[lanes]`. Both results are `[n, lanes]`.
        """
        num_rows = len(ends)
        # The running maximum is the first step of the current trajectory of each lane. It is below
        # 0 if the trajectory began before these rows.
        steps: Any
        if isinstance(ends, np.ndarray):
            steps = np.arange(1, num_rows + 1, dtype=np.int32)[:, None]
            later = steps - np.maximum.accumulate(np.where(ends, steps, -first_ages), axis=0)
            return np.concatenate([first_ages[None], later[:-1]]), later
        steps = torch.arange(1, num_rows + 1, dtype=torch.int32, device=ends.device).unsqueeze(1)
        later = steps - torch.where(ends, steps, -first_ages).cummax(0).values
        return torch.cat([first_ages.unsqueeze(0), later[:-1]]), later

    def _note_segments(self, segments: EndedRows, ends: Any, ages: Any) -> None:
        if self._is_on_cpu and not ends.any():
            return
        ended = tensor_of(ends)
        segments.make_room(ended)
        segments.append(ended, {"num_rows": tensor_of(ages).long() + 1})

    def _note_final(self, ends: Any, final: Rows) -> Any:
        """Store final observations. Return the ages of the rows after ended rows, `[n, lanes]`."""
        if self._is_on_cpu and not ends.any():
            return np.zeros(ends.shape, np.int32)
        ended = tensor_of(ends)
        if self.finals is None:
            self.finals = EndedRows(self.ring, final.schema)
        moved = self.finals.make_room(ended)
        if moved is not None:
            self._write_places(moved)
        leaves = {
            name: leaf.to(ended.device)
            for name, leaf in zip(final.schema, final.tensors, strict=True)
        }
        rows, places, lost = self.finals.append(ended, leaves)
        if lost is not None:
            index = torch.where(
                lost >= 0, (lost + self.ring.num_lanes) % self.ages.numel(), self.ages.numel()
            )
            self._all_ages.index_fill_(0, index, 0)
            self.num_lost_finals = self.num_lost_finals + (lost >= 0).sum()
            return (-places).to(torch.int32).view(ended.shape)
        begins = torch.zeros(ended.numel(), dtype=torch.int32, device=ended.device)
        begins[rows] = (-places).to(torch.int32)
        return own(begins.view(ended.shape))

    def _write_places(self, keys: torch.Tensor) -> None:
        """Write the slot of each final observation, negated, into the age of the row after it.

        `keys` are the keys of the ended rows, by slot.
        """
        ring = self.ring
        is_live = keys >= ring.oldest * ring.num_lanes
        index = torch.where(is_live, (keys + ring.num_lanes) % self.ages.numel(), self.ages.numel())
        self._all_ages[index] = torch.arange(
            0, -len(keys), -1, dtype=torch.int32, device=keys.device
        )

    # Drawing.

    def _marks(self, lane: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return the ages of the following rows; below 0 where a final observation is stored."""
        return self._all_ages.take((row + 1) % self._num_slots * self.ring.num_lanes + lane)

    def _candidates(self, length: int) -> tuple[int, int]:
        """Return the first candidate and the number of candidates for windows of live rows.

        Candidates are numbered step by step, and lane by lane within a step. The candidate of a
        window is the index of its last row in the flat `ages`, without wrapping at the end of the
        ring.
        """
        ring = self.ring
        first = (ring.oldest + length - 1) % self._num_slots
        return first * ring.num_lanes, max(ring.num_live - length + 1, 0) * ring.num_lanes

    def _shift(self, length: int) -> int:
        """Return the id of a window's last row minus the row number of its candidate."""
        first = self.ring.oldest + length - 1
        return first - first % self._num_slots

    def _decode(self, candidate: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lane and the last row of candidates."""
        row = torch.div(candidate, self.ring.num_lanes, rounding_mode="floor")
        return add_multiple(candidate, row, -self.ring.num_lanes), row + self._shift(length)

    def _judge_inside(self, length: int) -> _Judge:
        """Return a function that accepts windows inside one trajectory."""
        ages = self._flat_ages
        least = length - 1 if length > 1 else _LEAST_AGE
        if isinstance(ages, torch.Tensor):
            return lambda candidate: (ages.take(candidate % len(ages)) >= least, None)
        return lambda candidate: (ages.take(candidate, mode="wrap") >= least, None)

    def _judge(self, extent: Extent, candidates: tuple[int, int]) -> _Judge:
        """Return a function that accepts candidates with the rows of `extent` around them."""
        ages = self._flat_ages
        lanes = self.ring.num_lanes
        num_before = extent.num_before
        num_after = extent.num_after
        first, stop = candidates[0] - num_before * lanes, sum(candidates)

        def judge(candidate: Any) -> tuple[Any, Any]:
            codes = None
            if extent.ends == "never":
                later = candidate + num_after * lanes
                accepted = ages.take(later % len(ages)) >= num_before + num_after
                accepted &= later < stop
            else:
                codes = self._codes(candidate, num_after)
                accepted = add_multiple(candidate, codes >> _PLACE_BITS, lanes) < stop
                if extent.ends == "known":
                    accepted &= (codes & _PLACE) > 0
                if num_before:
                    accepted &= ages.take(candidate % len(ages)) >= num_before
            if extent.num_frames > 1:
                num_back = ages.take(candidate % len(ages)).clip(0, extent.num_frames - 1)
                accepted &= candidate - num_back * lanes >= first
            return accepted, codes

        return judge if num_after else self._judge_inside(num_before + 1)

    def _codes(self, candidate: Any, num_after: int) -> Any:
        """Return one code per candidate: the number of later rows and the final observation.

        The upper bits are the number of later rows, at most `num_after`. The lower bits are 1 if
        the trajectory continues after these rows. If it ends, they are the slot of the final
        observation, 0 if unknown. Codes that reach beyond the last written row are arbitrary.
        """
        lib = self._library
        ages = self._flat_ages
        lanes = self.ring.num_lanes
        goes_on = (num_after << _PLACE_BITS) + 1
        if num_after == 1:
            marks = ages.take((candidate + lanes) % len(ages))
            return lib.where(
                marks > 0, goes_on, -marks.astype(np.int64) if lib is np else -marks.long()
            )
        if num_after not in self._steps:
            self._steps[num_after] = self._new_steps(num_after)
        steps, numbers = self._steps[num_after]
        marks = ages.take((candidate[:, None] + steps) % len(ages))
        return lib.amin(lib.where(marks > 0, goes_on, numbers - marks), 1)

    @lasting
    def _new_steps(self, num_after: int) -> tuple[Any, Any]:
        """Return the offsets of later rows in `ages`, and row numbers as upper bits of codes.

        On a device the first draw of a kind waits, so that all streams may use both results
        afterwards.
        """
        lanes = self.ring.num_lanes
        device = self.ring.device
        steps = torch.arange(lanes, num_after * lanes + 1, lanes, device=device)
        return own(steps), own(
            torch.arange(0, num_after << _PLACE_BITS, 1 << _PLACE_BITS, device=device)
        )

    def _reject(
        self,
        num_draws: int,
        candidates: tuple[int, int] | _Propose,
        judge: _Judge,
        generator: torch.Generator,
        name: Any,
    ) -> tuple[Any, Any]:
        """Draw uniformly over the accepted candidates; (None, None) if none is accepted.

        Args:
            num_draws: Number of draws.
            candidates: First candidate and number of candidates; or a function that draws
                candidates.
            judge: Function that accepts candidates.
            generator: Random generator on the device of the ring.
            name: Key of the kind of draw, hashable.

        Returns:
            The candidates and their codes.
        """
        self.deferred.raise_arrived()
        if isinstance(candidates, tuple) and not candidates[1]:
            return None, None
        kind = None if self._is_on_cpu else self._kind(name)
        if kind is not None:
            size = kind.num_candidates(num_draws)
            if 0 < size <= max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
                return self._reject_without_waiting(
                    kind, num_draws, size, candidates, judge, generator
                )
            if kind.numbers is None:
                kind.numbers = torch.arange(num_draws, device=self.ring.device)
        num_proposed = 0
        missing = num_draws
        parts: list[tuple[Any, Any]] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # Extra candidates of four standard deviations cost less than a second round.
            share = max(1, int(self.share * _WHOLE_SHARE))
            num_extra = isqrt(16 * missing * (_WHOLE_SHARE - share) // _WHOLE_SHARE)
            size = ((missing + num_extra) * _WHOLE_SHARE // share + 8) // 8 * 8
            size = min(size, _MAX_CANDIDATES)
            proposed = self._propose(size, candidates, generator)
            flags, codes = judge(proposed)
            accepted = proposed[flags]
            num_accepted = len(accepted)
            share = (4 * share + num_accepted * _WHOLE_SHARE // size) // 5
            self.share = max(share, _LEAST_SHARE) / _WHOLE_SHARE
            if kind is not None:
                kind.note(num_accepted, size)
            parts.append((accepted[:missing], None if codes is None else codes[flags][:missing]))
            if num_accepted >= missing:
                return parts[0] if len(parts) == 1 else _joined(parts)
            num_proposed += size
            missing -= num_accepted
        if not isinstance(candidates, tuple):
            assert self._segments is not None
            candidates = (0, int(self._segments.num_live()) + self.ring.num_lanes)
        listed, codes = _list(candidates, judge, self.ring.device)
        if not len(listed):
            return None, None
        chosen = own(uniform(len(listed), missing, generator))
        parts.append((listed[chosen], None if codes is None else codes[chosen]))
        return _joined(parts)

    def _propose(
        self, size: int, candidates: tuple[int, int] | _Propose, generator: torch.Generator
    ) -> Any:
        """Return `size` random candidates: an array on the CPU, else a tensor."""
        if not isinstance(candidates, tuple):
            return candidates(size, generator)
        first, num_candidates = candidates
        if not self._is_on_cpu:  # Another stream may still read memory of an earlier draw.
            memory = torch.empty(size, dtype=torch.int64, device=self.ring.device)
        else:
            memory = self._memories[size] if size in self._memories else self._memory_for(size)
        return own(fill_uniform(memory, num_candidates, generator, first))

    def _kind(self, name: Any) -> _Kind:
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[name] = _Kind(name)
        return kind

    def _read_draw(
        self, kind: _Kind, size: int, num_draws: int, num_accepted: int
    ) -> UsageError | None:
        """Note that an earlier draw accepted `num_accepted` of `size` candidates.

        Returns the error of the draw if it accepted no candidate.
        """
        is_short = num_accepted < num_draws
        self.num_short_draws += is_short
        if self._kinds.get(kind.name) is kind:
            kind.note(num_accepted, size)
            self.share = max(kind.share, _LEAST_SHARE / _WHOLE_SHARE)
            if is_short:  # The next draw waits and measures the share again.
                del self._kinds[kind.name]
        if num_accepted:
            return None
        return UsageError(
            "an earlier call found no valid row or window. Discard its batch and add more rows."
        )

    def _reject_without_waiting(
        self,
        kind: _Kind,
        num_draws: int,
        size: int,
        candidates: tuple[int, int] | _Propose,
        judge: _Judge,
        generator: torch.Generator,
    ) -> tuple[Any, Any]:
        """Draw from `size` candidates without a wait for the number of accepted candidates.

        If fewer than `num_draws` candidates are accepted, the result repeats accepted candidates.
        """
        # The extra candidate is the result if no other is accepted; a later call raises the error.
        proposed = self._propose(size + 1, candidates, generator)
        flags, codes = judge(proposed)
        rank = flags[:-1].cumsum(0)
        num_accepted = rank[-1]
        numbers = kind.numbers
        if numbers is None or len(numbers) != num_draws:
            numbers = torch.arange(num_draws, device=rank.device)
        chosen = torch.searchsorted(rank, numbers % num_accepted.clamp(min=1), right=True)
        # The copy follows the search, so that `kind.numbers` lives until the search is done.
        self.deferred.note(num_accepted, partial(self._read_draw, kind, size, num_draws))
        return proposed.index_select(0, chosen), None if codes is None else codes.index_select(
            0, chosen
        )

    @lasting
    def _memory_for(self, size: int) -> torch.Tensor:
        """Return reused memory for candidates. New memory takes 2 of 24 us of a small draw."""
        if len(self._memories) >= _MAX_MEMORIES:
            self._memories.clear()
        memory = self._memories[size] = torch.empty(
            size, dtype=torch.int64, device=self.ring.device
        )
        return memory


def _replace(
    leaf: torch.Tensor, flags: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Replace the rows of a leaf `[n, *event]` where `[n]` flags are set.

    Args:
        leaf: Changed in place.
        flags: `[n]` bool.
        rows: Numbers of the rows whose flag is set; None if the host does not know them.
        values: New values of `rows`; of all rows if `rows` is None.
    """
    if rows is None:
        wide = flags.view(-1, *[1] * (leaf.dim() - 1))
        torch.where(wide, signed(values), signed(leaf), out=signed(leaf))
    elif len(rows):
        signed(leaf)[rows] = signed(values)


def _with_codes(
    lane: torch.Tensor, row: torch.Tensor, codes: torch.Tensor, num_after: int
) -> Drawn:
    num_ahead = codes >> _PLACE_BITS
    return Drawn(lane, row, num_ahead, num_ahead < num_after, codes & _PLACE)


def _list(candidates: tuple[int, int], judge: _Judge, device: torch.device) -> tuple[Any, Any]:
    """Return all accepted candidates in order, and their codes."""
    parts: list[tuple[Any, Any]] = []
    start = candidates[0]
    end = sum(candidates)
    while start < end or not parts:
        stop = min(start + _NUM_LISTED, end)
        listed = own(torch.arange(start, stop, device=device))
        flags, codes = judge(listed)
        parts.append((listed[flags], None if codes is None else codes[flags]))
        start = stop
    return _joined(parts)


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    def joined(pieces: list[Any]) -> Any:
        if pieces[0] is None:
            return None
        return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else np.concatenate(pieces)

    return joined([rows for rows, _ in parts]), joined([codes for _, codes in parts])
