"""Valid windows of a ring: the age of each row, and exact draws of windows inside one trajectory.

The age of a row is the number of rows since its trajectory began. A window of L rows that ends at
row e is valid if and only if `age[e] >= L - 1` and its first row is live. No list of boundaries is
searched, so the cost of a write or a draw does not depend on the size of the ring.

Draws use rejection sampling. A candidate is the number of a row at which a window may end.
Candidates are drawn uniformly from all rows at which a window of live rows ends. A candidate is
accepted if its window is inside one trajectory. The first accepted candidates are the result. They
are independent and uniform over the valid windows at any acceptance rate. The rate only determines
how many candidates are drawn. If almost no candidate is accepted, all valid windows are listed and
the result is drawn from the list, with the same distribution. Draws by trajectory work alike, with
trajectories as candidates.

On a GPU the host does not wait for the number of accepted candidates. It draws so many candidates
that too few are accepted in only one of 10**9 draws. A later draw reads the number.
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

#: Function that tests candidates. It returns whether each candidate is accepted, `[n]` bool, and a
#: code of how the trajectory of the candidate continues, `[n]` int64 or None.
_Accept = Callable[[Any], tuple[Any, Any]]
#: Function that reads a field. It receives the name of the field and the numbers of rows, None for
#: all rows, and returns the values `[n, *event]`.
_RowsOf = Callable[[str, torch.Tensor | None], torch.Tensor]
#: Function that draws random candidates. It receives their number and a random generator.
_Propose = Callable[[int, torch.Generator], Any]
#: Maximum number of candidates that a call tests: about 65,536, or 64 per requested result if that
#: is more. A call that needs more lists all valid candidates and draws from the list.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: The share of accepted candidates is rounded to multiples of 1/65536. Every processor then draws
#: the same number of candidates. The smallest share is 66/65536, just above 0.001.
_WHOLE_SHARE, _LEAST_SHARE = 1 << 16, 66
#: Safety margin of a draw that does not wait for the device: the number of extra candidates, in
#: standard deviations of the number of accepted candidates.
_NUM_DEVIATIONS = 6
#: Number of candidates that are tested at once when all are listed. It limits the memory.
_NUM_LISTED = 1 << 20
#: Maximum number of cached tensors into which candidates are drawn. Each has a different length.
_MAX_MEMORIES = 16
#: Maximum number of kinds of draws (such as window lengths) whose share of accepted candidates is
#: remembered.
_MAX_KINDS = 64
#: Limit of stored ages of rows: above the length of any window, and safe from overflow of int32.
_MAX_AGE = 1 << 29
#: A number below every stored age, including negative entries, which are slots.
_LEAST_AGE = -(1 << 31)
#: Number of lower bits of a candidate's code. The lower bits contain the slot of a final
#: observation. The upper bits contain the number of later rows in the trajectory.
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
#: Field that is stored for each ended trajectory: its number of rows.
_SEGMENT = Schema([Field("num_rows", (), "int64")])


@dataclass(frozen=True)
class Extent:
    """Condition for drawing a row: the rows that must exist before and after the row.

    Attributes:
        num_before: Number of live rows of the same trajectory before the drawn row.
        num_frames: Length of a stack of frames that ends at the drawn row. Frames of the stack that
            belong to the trajectory of the row must be live.
        num_after: Number of rows after the drawn row.
        ends: Whether rows are drawn whose trajectory ends before `num_after` later rows. "never":
            they are not drawn. "known": they are drawn if the final observation of the trajectory
            is stored. "always": they are drawn.
    """

    num_before: int = 0
    num_frames: int = 1
    num_after: int = 0
    ends: str = "never"


class Drawn(NamedTuple):
    """Drawn rows, and the number of rows that follow them.

    Attributes:
        lane, row: `[n]` int64, lanes and row ids.
        num_ahead: Number of later rows in the same trajectory, at most `Extent.num_after`: `[n]`
            int64, or one number for all rows.
        ended: `[n]` bool, whether the trajectory ends before `Extent.num_after` later rows; None if
            no trajectory does.
        final: `[n]` int64, slot of the final observation in `EndedRows`, 0 if none is stored. The
            values are valid only where `ended` is True.
    """

    lane: torch.Tensor
    row: torch.Tensor
    num_ahead: Any = 0
    ended: torch.Tensor | None = None
    final: torch.Tensor | None = None


class _Kind:
    """Measured share of accepted candidates for draws with equal arguments, on a device.

    The number of draws is not one of these arguments, but the window length is, for example.
    """

    def __init__(self, name: Any) -> None:
        #: Arguments of the draws, as a hashable key.
        self.name = name
        self.share = 0.0
        #: Number of candidates from which `share` was measured. If it is 0, the next draw waits for
        #: the device and measures the share.
        self.num_tested = 0
        #: The numbers 0 to `num_draws - 1` of the first call. The first call waits for the device,
        #: so later calls may read this tensor in any CUDA stream.
        self.numbers: torch.Tensor | None = None

    def note(self, num_accepted: int, num_tested: int) -> None:
        """Update the share after a draw that accepted `num_accepted` of `num_tested` candidates."""
        share = num_accepted / num_tested
        self.share = min(share, 0.8 * self.share + 0.2 * share) if self.num_tested else share
        self.num_tested = num_tested

    def num_candidates(self, num_draws: int) -> int:
        """Return how many candidates to draw so that at least `num_draws` are accepted.

        Too few are accepted in only one of 10**9 draws. Returns 0 if the share of accepted
        candidates is unknown.
        """
        share = self.share
        num = self.num_tested
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
    """Positions of the rows of a ring in their trajectories, and draws of rows and windows.

    Args:
        ring: Ring of the rows. `note` must be called before each write to the ring.
        keeps_segments: Whether ended trajectories are listed, for draws by trajectory.
        deferred: Receives the errors of draws on a device.

    Attributes:
        ages: `[num_slots + 1, num_lanes]` int32; time first, so that a step of many lanes is
            written in one piece. The age of row i is at `i % (num_slots + 1)`. The additional entry
            is the age of the next row to be written. The first row of a trajectory has age 0. If a
            final observation of the previous trajectory is stored, the age is minus the slot of
            that observation.
        share: Share of candidates that recent draws accepted. It determines the number of
            candidates of the next draw. It is saved, since the next draws depend on the share and
            the random state.
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
        #: The flat `ages`, and one unused entry. Writes to skip go to it, without a wait.
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
        #: Cached tensors into which candidates are drawn, by number of candidates.
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
        """Record which new rows end a trajectory. Call this method before the ring stores the rows.

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
            first_ages = first_ages.clip(0)
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
        """Forget all rows and trajectories, because the ring was cleared."""
        self.ages[0].zero_()
        self._kinds.clear()
        for kept in (self._segments, self.finals):
            if kept is not None:
                kept.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return how many rows of its trajectory precede each row.

        Each row is live, or is the next row that will be written to its lane.
        """
        index = row_id % self._num_slots * self.ring.num_lanes + lane
        ages = self._all_ages.take(index)
        return ages if self.finals is None else ages.clamp(min=0)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return whether each live row is the last of its trajectory."""
        return self.age(lane, row_id + 1) == 0

    def finals_of(self, names: Iterable[str]) -> EndedRows | None:
        """Return the stored final observations, or None if they lack a field in `names`."""
        return (
            self.finals
            if self.finals is not None and all(name in self.finals.schema for name in names)
            else None
        )

    def ends_for(self, names: Iterable[str], is_marked: bool) -> str:
        """Return which ends of trajectories may be drawn, if a draw also returns the next row.

        The result is "never", "known" or "always", as defined for `Extent.ends`.

        Args:
            names: Names of the fields that the draw returns of the next row.
            is_marked: Whether rows without a known next row are drawn and marked.
        """
        if is_marked:
            return "always"
        return "never" if self.finals_of(names) is None else "known"

    def restore_finals(
        self, schema: Schema, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]
    ) -> None:
        """Load saved final observations, which must belong to live rows.

        `keys` and `leaves` are a result of `EndedRows.live`.

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
        """Correct the next observations of drawn rows whose trajectory ended.

        The row after the last row of a trajectory belongs to another trajectory. It is replaced by
        the final observation, or by the last row itself if no final observation is stored.

        Args:
            following: `[n, *event]` per field, the rows after the drawn rows; changed in place.
            last_rows: Function that returns a field of the last row of each trajectory that ended.
                None: `following` already contains these last rows.
            drawn: The drawn rows.
            is_marked: Whether the drawn rows may include ends without a final observation.

        Returns:
            `[n]` bool, whether each following row is now a true next observation; None if all are.
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
        """Draw rows with replacement, uniformly over all rows with the required neighbors.

        Args:
            num_draws: Number of draws.
            extent: Rows that must exist before and after a drawn row.
            generator: Random generator on the device of the ring.

        Returns:
            The rows; None if no row is valid.
        """
        length = extent.num_before + 1
        candidates = self._candidates(length)
        drawn, codes = self._draw_candidates(
            num_draws, candidates, self._accept_around(extent, candidates), generator, extent
        )
        if drawn is None:
            return None
        lane, row = self._decode(tensor_of(drawn), length)
        if codes is None:
            return Drawn(lane, row, extent.num_after)
        return _with_codes(lane, row, tensor_of(codes), extent.num_after)

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> Any:
        """Draw windows uniformly from all windows of `length` rows inside one trajectory.

        Returns:
            `[num_draws]` positions of the first rows of the windows in memory, as of
            `RingStore.place`: an array on the CPU, else a tensor. None if no window is valid.
        """
        drawn, _ = self._draw_candidates(
            num_draws,
            self._candidates(length),
            self._accept_inside(length),
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

        Only trajectories with at least `length` live rows are drawn.

        Args:
            num_draws: Number of windows.
            length: Number of rows of a window.
            generator: Random generator on the device of the ring.
            ends: Whether a window in an ended trajectory may reach one row beyond the last row,
                because the final observation replaces that row: "never", "known" or "always"; see
                `Extent`.

        Returns:
            The lanes and the ids of the last rows of the windows, `[num_draws]` int64 each. None if
            no trajectory is long enough.
        """
        assert self._segments is not None, "created with keeps_segments=True"
        ring = self.ring
        segments = self._segments
        num_ended = segments.num_live()

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Look up candidate trajectories: return their lanes, last rows and numbers of rows.

            Trajectories are numbered from 0: first the ended trajectories, then the open
            trajectory of each lane.
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
            continues = ~is_open
            if ends == "known":
                continues = continues & (self._following_ages(lane, last) < 0)
            return lane, last + continues, num_rows + continues

        def accept(candidate: Any) -> tuple[Any, Any]:
            return own(decode(tensor_of(candidate))[2] >= length), None

        def on_device(num: int, generator: Any) -> Any:
            return random_bits(num, generator) % (num_ended + ring.num_lanes)

        candidates: Any = (0, num_ended + ring.num_lanes) if self._is_on_cpu else on_device
        drawn, _ = self._draw_candidates(
            num_draws, candidates, accept, generator, ("trajectories", length, ends)
        )
        if drawn is None:
            return None
        lane, last, num_rows = decode(tensor_of(drawn))
        return lane, last - below(num_rows - length + 1, generator)

    def follow(self, lane: torch.Tensor, row: torch.Tensor) -> Drawn:
        """Return for live rows whether each is the last of its trajectory.

        In the result, `num_ahead` is 1, or 0 for the last row of a trajectory.
        """
        ages = self._following_ages(lane, row)
        ended = ages <= 0
        return Drawn(lane, row, (~ended).long(), ended, (-ages.long()).clamp_(min=0))

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lane and the id of the last row of every valid window, as a pair of tensors.

        The windows are sorted by lane, and then from the oldest to the newest.
        """
        listed, _ = _list_accepted(
            self._candidates(length), self._accept_inside(length), self.ring.device
        )
        lane, last = self._decode(tensor_of(listed), length)
        order = lane.argsort(stable=True)
        return lane[order], last[order]

    # Writing.

    def _later_ages(self, ends: Any, first_ages: Any) -> tuple[Any, Any]:
        """Compute how many rows of its trajectory precede each new row: its age.

        Args:
            ends: `[n, lanes]` bool, whether each new row ends a trajectory.
            first_ages: `[lanes]`, age of the first new row of each lane.

        Returns:
            The ages of the new rows, and the ages of the rows that follow them: `[n, lanes]` each.
        """
        num_rows = len(ends)
        # The running maximum is the step at which the current trajectory of each lane began. It is
        # negative if the trajectory began before the new rows.
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
        """Store the final observations of trajectories that end in the new rows.

        Returns:
            `[n, lanes]` int32, the age of the row after each new row that ends a trajectory: minus
            the slot of the final observation. The other entries are 0.
        """
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
        rows, places, overwritten = self.finals.append(ended, leaves)
        if overwritten is not None:
            # Writes of 0 for slots that lost no observation go to the unused last element.
            keys, is_lost = overwritten
            unused = self.ages.numel()
            index = torch.where(is_lost, (keys + self.ring.num_lanes) % unused, unused)
            self._all_ages.index_fill_(0, index, 0)
            self.num_lost_finals = self.num_lost_finals + is_lost.sum()
            return (-places).to(torch.int32).view(ended.shape)
        begins = torch.zeros(ended.numel(), dtype=torch.int32, device=ended.device)
        begins[rows] = (-places).to(torch.int32)
        return own(begins.view(ended.shape))

    def _write_places(self, keys: torch.Tensor) -> None:
        """Record in which slot the final observation of each ended trajectory is.

        Slot s is stored as the age -s of the row after the trajectory. `keys[s]` is the key of the
        trajectory's last row, or -1.
        """
        ring = self.ring
        is_live = keys >= ring.oldest * ring.num_lanes
        index = torch.where(is_live, (keys + ring.num_lanes) % self.ages.numel(), self.ages.numel())
        self._all_ages[index] = torch.arange(
            0, -len(keys), -1, dtype=torch.int32, device=keys.device
        )

    # Drawing.

    def _following_ages(self, lane: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return the stored age of the row after each row: `[n]` int32.

        A number above 0 means that the trajectory continues. 0 means that it ended. -s means that
        it ended and that its final observation is in slot s.
        """
        return self._all_ages.take((row + 1) % self._num_slots * self.ring.num_lanes + lane)

    def _candidates(self, length: int) -> tuple[int, int]:
        """Return the range of candidates for windows of `length` live rows.

        The range is a pair: the first candidate, and the number of candidates. A candidate is the
        index of a window's last row in the flat `ages`. Indices continue to increase beyond the end
        of `ages`, so the index must be taken modulo its length.
        """
        ring = self.ring
        first = (ring.oldest + length - 1) % self._num_slots
        return first * ring.num_lanes, max(ring.num_live - length + 1, 0) * ring.num_lanes

    def _shift(self, length: int) -> int:
        """Return the number to add to `candidate // num_lanes` to get the id of the row.

        It is the same for all candidates of windows of `length` rows.
        """
        first = self.ring.oldest + length - 1
        return first - first % self._num_slots

    def _decode(self, candidate: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert candidates to the lanes and the ids of the windows' last rows."""
        row = torch.div(candidate, self.ring.num_lanes, rounding_mode="floor")
        return add_multiple(candidate, row, -self.ring.num_lanes), row + self._shift(length)

    def _accept_inside(self, length: int) -> _Accept:
        """Return a function that tests whether windows are inside one trajectory."""
        ages = self._flat_ages
        least = length - 1 if length > 1 else _LEAST_AGE
        if isinstance(ages, torch.Tensor):
            return lambda candidate: (ages.take(candidate % len(ages)) >= least, None)
        return lambda candidate: (ages.take(candidate, mode="wrap") >= least, None)

    def _accept_around(self, extent: Extent, candidates: tuple[int, int]) -> _Accept:
        """Return a function that tests whether rows have the neighbors that `extent` requires.

        `candidates` is the range of all candidates: the first, and their number.
        """
        ages = self._flat_ages
        lanes = self.ring.num_lanes
        num_before = extent.num_before
        num_after = extent.num_after
        first, stop = candidates[0] - num_before * lanes, sum(candidates)

        def accept(candidate: Any) -> tuple[Any, Any]:
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

        return accept if num_after else self._accept_inside(num_before + 1)

    def _codes(self, candidate: Any, num_after: int) -> Any:
        """Compute for each candidate how many rows follow in its trajectory, as an int64 code.

        A code contains two numbers, so that one minimum over the later rows finds both. The upper
        bits are the number of later rows in the same trajectory, at most `num_after`. If there are
        `num_after` rows, the lower bits are 1. If the trajectory ends earlier, the lower bits are
        the slot of its final observation, 0 if none is stored. A code is arbitrary if the rows
        after the candidate extend beyond the last written row.
        """
        lib = self._library
        ages = self._flat_ages
        lanes = self.ring.num_lanes
        continues = (num_after << _PLACE_BITS) + 1
        if num_after == 1:
            following_age = ages.take((candidate + lanes) % len(ages))
            final = -(following_age.astype(np.int64) if lib is np else following_age.long())
            return lib.where(following_age > 0, continues, final)
        if num_after not in self._steps:
            self._steps[num_after] = self._new_steps(num_after)
        steps, numbers = self._steps[num_after]
        later_ages = ages.take((candidate[:, None] + steps) % len(ages))
        return lib.amin(lib.where(later_ages > 0, continues, numbers - later_ages), 1)

    @lasting
    def _new_steps(self, num_after: int) -> tuple[Any, Any]:
        """Build two constant arrays to look up the `num_after` rows after a candidate.

        The first contains the distances in the flat `ages` from a row to the 1st, 2nd, ... later
        row. The second contains the numbers 0, 1, ... of later rows, shifted to the upper bits of a
        code. The first draw with these arguments waits for the device. All CUDA streams may
        therefore read both arrays afterwards.
        """
        lanes = self.ring.num_lanes
        device = self.ring.device
        steps = torch.arange(lanes, num_after * lanes + 1, lanes, device=device)
        return own(steps), own(
            torch.arange(0, num_after << _PLACE_BITS, 1 << _PLACE_BITS, device=device)
        )

    def _draw_candidates(
        self,
        num_draws: int,
        candidates: tuple[int, int] | _Propose,
        accept: _Accept,
        generator: torch.Generator,
        name: Any,
    ) -> tuple[Any, Any]:
        """Draw valid candidates with replacement by rejection sampling.

        The draws are uniform over all candidates that `accept` accepts.

        Args:
            num_draws: Number of draws.
            candidates: Range of candidates as (first candidate, number), or a function that draws
                candidates.
            accept: Function that decides which candidates are accepted.
            generator: Random generator on the device of the ring.
            name: Arguments of the draw except `num_draws`, as a hashable key. The share of accepted
                candidates is remembered under this key.

        Returns:
            `[num_draws]` accepted candidates and their codes. (None, None) if no candidate is
            valid.
        """
        self.deferred.raise_arrived()
        if isinstance(candidates, tuple) and not candidates[1]:
            return None, None
        kind = None if self._is_on_cpu else self._kind(name)
        if kind is not None:
            size = kind.num_candidates(num_draws)
            if 0 < size <= max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
                return self._draw_without_waiting(
                    kind, num_draws, size, candidates, accept, generator
                )
            if kind.numbers is None:
                kind.numbers = torch.arange(num_draws, device=self.ring.device)
        num_proposed = 0
        missing = num_draws
        parts: list[tuple[Any, Any]] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # Extra candidates of four standard deviations cost less than a second loop iteration.
            share = max(1, int(self.share * _WHOLE_SHARE))
            num_extra = isqrt(16 * missing * (_WHOLE_SHARE - share) // _WHOLE_SHARE)
            size = ((missing + num_extra) * _WHOLE_SHARE // share + 8) // 8 * 8
            size = min(size, _MAX_CANDIDATES)
            proposed = self._propose(size, candidates, generator)
            flags, codes = accept(proposed)
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
        listed, codes = _list_accepted(candidates, accept, self.ring.device)
        if not len(listed):
            return None, None
        chosen = own(uniform(len(listed), missing, generator))
        parts.append((listed[chosen], None if codes is None else codes[chosen]))
        return _joined(parts)

    def _propose(
        self, size: int, candidates: tuple[int, int] | _Propose, generator: torch.Generator
    ) -> Any:
        """Draw `size` random candidates: an array on the CPU, else a tensor."""
        if not isinstance(candidates, tuple):
            return candidates(size, generator)
        first, num_candidates = candidates
        if not self._is_on_cpu:  # Another stream may still read the memory of an earlier draw.
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
        """Check an earlier draw after its number of accepted candidates has reached the host.

        Also updates the measured share of accepted candidates.

        Args:
            kind: Measured share for draws with the same arguments.
            size: Number of candidates of the draw.
            num_draws: Number of requested results.
            num_accepted: Number of accepted candidates.

        Returns:
            The error to raise if no candidate was accepted, else None.
        """
        is_short = num_accepted < num_draws
        self.num_short_draws += is_short
        if self._kinds.get(kind.name) is kind:
            kind.note(num_accepted, size)
            self.share = max(kind.share, _LEAST_SHARE / _WHOLE_SHARE)
            if is_short:  # The next draw with equal arguments measures the share and waits.
                del self._kinds[kind.name]
        if num_accepted:
            return None
        return UsageError(
            "an earlier call found no valid row or window. Discard its batch and add more rows."
        )

    def _draw_without_waiting(
        self,
        kind: _Kind,
        num_draws: int,
        size: int,
        candidates: tuple[int, int] | _Propose,
        accept: _Accept,
        generator: torch.Generator,
    ) -> tuple[Any, Any]:
        """Draw valid candidates on a device, without waiting for the number of accepted candidates.

        If fewer than `num_draws` of `size` candidates are accepted, the result repeats accepted
        candidates. A later call then increments `num_short_draws`.
        """
        # If no candidate is accepted, the result is the additional last candidate, and a later call
        # raises an error.
        proposed = self._propose(size + 1, candidates, generator)
        flags, codes = accept(proposed)
        rank = flags[:-1].cumsum(0)
        num_accepted = rank[-1]
        numbers = kind.numbers
        if numbers is None or len(numbers) != num_draws:
            numbers = torch.arange(num_draws, device=rank.device)
        chosen = torch.searchsorted(rank, numbers % num_accepted.clamp(min=1), right=True)
        # The callback references `kind` until the copy to the host is complete, which is after the
        # search. So the search never reads freed memory of `kind.numbers`.
        self.deferred.note(num_accepted, partial(self._read_draw, kind, size, num_draws))
        return proposed.index_select(0, chosen), None if codes is None else codes.index_select(
            0, chosen
        )

    @lasting
    def _memory_for(self, size: int) -> torch.Tensor:
        """Allocate and cache a tensor into which `size` candidates are drawn.

        Without the cache, the allocation takes 2 of the 24 us of a small draw.
        """
        if len(self._memories) >= _MAX_MEMORIES:
            self._memories.clear()
        memory = self._memories[size] = torch.empty(
            size, dtype=torch.int64, device=self.ring.device
        )
        return memory


def _replace(
    leaf: torch.Tensor, flags: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Replace selected rows of a tensor in place.

    Args:
        leaf: `[n, *event]`, changed in place.
        flags: `[n]` bool, whether each row is replaced.
        rows: Numbers of the replaced rows. None on a device, where the host does not know them.
        values: New values: one per entry of `rows`, or `[n, *event]` if `rows` is None.
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


def _list_accepted(
    candidates: tuple[int, int], accept: _Accept, device: torch.device
) -> tuple[Any, Any]:
    """Return all accepted candidates in ascending order, and their codes or None.

    A call that accepts too few random candidates draws from this list instead.
    """
    parts: list[tuple[Any, Any]] = []
    start = candidates[0]
    end = sum(candidates)
    while start < end or not parts:
        stop = min(start + _NUM_LISTED, end)
        listed = own(torch.arange(start, stop, device=device))
        flags, codes = accept(listed)
        parts.append((listed[flags], None if codes is None else codes[flags]))
        start = stop
    return _joined(parts)


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    def joined(pieces: list[Any]) -> Any:
        if pieces[0] is None:
            return None
        return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else np.concatenate(pieces)

    return joined([rows for rows, _ in parts]), joined([codes for _, codes in parts])
