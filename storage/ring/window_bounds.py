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

On a GPU the host does not wait for the number of accepted candidates. It proposes so many that too few are accepted
once in 10**9 draws, and reads their number at a later draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.fields import Field, Schema, signed
from ..core.memory import LateNumber, add_multiple, filled, lasting, library, own, tensor_of
from ..core.random_indices import below, fill_uniform, random_bits, uniform
from ..core.records import Rows
from ..errors import UsageError
from .ring_store import RingStore, spans
from .trajectory_ends import EndedRows

#: Candidates, as `own` gives them -> whether each is accepted, and a code of each or None.
_Judge = Callable[[Any], tuple[Any, Any]]
#: Name of a field, and which rows, None for all -> `[n, *event]`.
_RowsOf = Callable[[str, torch.Tensor | None], torch.Tensor]
#: Number of candidates and generator -> candidates.
_Propose = Callable[[int, torch.Generator], Any]
#: Candidates that are proposed in vain before all are listed: in all, and per draw.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: Shares are counted in units of 2**-16, so that every processor proposes equally many; the least one is above 0.001.
_WHOLE_SHARE, _LEAST_SHARE = 1 << 16, 66
#: Draws that do not wait propose so many standard deviations more candidates than are enough on average.
_NUM_DEVIATIONS = 6
#: Candidates that are listed at once, which bounds the memory of listing.
_NUM_LISTED = 1 << 20
#: For how many numbers of candidates memory is kept.
_MAX_MEMORIES = 16
#: For how many kinds of draws the share of accepted candidates is kept.
_MAX_KINDS = 64
#: Ages stop here, far above any window, so that they never overflow.
_MAX_AGE = 1 << 29
#: Below every age, also those that hold the place of a final observation.
_LEAST_AGE = -(1 << 31)
#: Codes hold the place of a final observation in their lower bits, and a number of rows above.
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
#: What is known of an ended trajectory.
_SEGMENT = Schema([Field("num_rows", (), "int64")])


@dataclass(frozen=True)
class Extent:
    """Rows that a draw needs around the row that it draws.

    Attributes:
        num_before: Rows before it, live and of its trajectory.
        num_frames: Frames up to it. They are live; rows before the trajectory's first are not needed.
        num_after: Rows after it.
        ends: Whether the trajectory may end before all rows after it were written: "never"; if its final observation
            is "known"; or "always".
    """

    num_before: int = 0
    num_frames: int = 1
    num_after: int = 0
    ends: str = "never"


class Drawn(NamedTuple):
    """Rows that were drawn, and what follows them.

    Attributes:
        lane, row: `[n]` int64; row ids.
        num_ahead: `[n]` int64, rows of the trajectory that follow, at most as many as were asked for; or one number.
        ended: `[n]` bool, whether the trajectory ends with them; None if none does.
        final: `[n]` int64, place of the final observation, 0 if it is not known; has no meaning where not `ended`.
    """

    lane: torch.Tensor
    row: torch.Tensor
    num_ahead: Any = 0
    ended: torch.Tensor | None = None
    final: torch.Tensor | None = None


class _Kind:
    """Draws of one kind on a device: the share of candidates that were accepted lately."""

    def __init__(self, device: torch.device) -> None:
        self.share = 0.0
        #: Candidates that the share was counted of; 0 if the next draw must wait.
        self.num_judged = 0
        self.late_number = LateNumber(device)
        #: 0, 1, ... of as many draws as the first one, which waits; all streams may use it afterwards.
        self.numbers: torch.Tensor | None = None

    def note(self, num_accepted: int, num_judged: int) -> None:
        """Take over how many candidates a draw accepted."""
        share = num_accepted / num_judged
        self.share = min(share, 0.8 * self.share + 0.2 * share) if self.num_judged else share
        self.num_judged = num_judged

    def num_candidates(self, num_draws: int) -> int:
        """Return of how many candidates too few are accepted once in 10**9 times; 0 if that is not known."""
        share = self.share
        num = self.num_judged
        z = _NUM_DEVIATIONS
        if not num:
            return 0
        # Wilson's lower bound of the share, and 5 % less for what is written in the meantime.
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
        ring: The ring, whose `total` must be what it was when these rows were noted.
        keeps_segments: Whether ended trajectories are listed, for draws by trajectory.

    Attributes:
        ages: `[num_slots + 1, num_lanes]` int32; time first, so that a step of many lanes is written in one piece. Row
            i is at `i % (num_slots + 1)`, so that the age of the row that comes next is there as well. The first row
            of a trajectory has age 0, or minus the place of the final observation of the trajectory before it.
        share: How many candidates were accepted lately, to propose about enough next time. Saved with the random
            state, as both say which numbers come next.
        finals: What was observed after the last rows of trajectories, if that was ever given.
        num_lost_finals: Final observations that were overwritten before their rows; on the CPU none ever is.
        num_short_draws: Draws on a device that found too few valid rows and repeated some.
    """

    @lasting
    def __init__(self, ring: RingStore, keeps_segments: bool = False) -> None:
        self.ring = ring
        self._num_slots = ring.num_slots + 1
        #: The last one takes what is written nowhere.
        self._all_ages = filled((self._num_slots * ring.num_lanes + 1,), 0, torch.int32, ring.device)
        self.ages = self._all_ages[:-1].view(self._num_slots, ring.num_lanes)
        self.share = 0.9
        self.finals: EndedRows | None = None
        self.num_lost_finals: torch.Tensor | int = 0
        self.num_short_draws = 0
        self._segments = EndedRows(ring, _SEGMENT) if keeps_segments else None
        self._is_on_cpu = ring.device.type == "cpu"
        self._library: Any = library(ring.device)
        #: By size, of a few sizes.
        self._memories: dict[int, torch.Tensor] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._steps: dict[int, tuple[Any, Any]] = {}
        # As arrays on the CPU, where numpy takes a third of the time for few rows.
        self._ages = own(self.ages)
        self._flat_ages = own(self._all_ages[:-1])

    @property
    def next_ages(self) -> torch.Tensor:
        """Ages of the rows that come next, `[num_lanes]` int32, sharing memory."""
        return self.ages[self.ring.total % self._num_slots]

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
        """Forget every row."""
        self.ages[0].zero_()
        self._kinds.clear()
        for kept in (self._segments, self.finals):
            if kept is not None:
                kept.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return the ages of live rows, or of the rows that come next."""
        index = row_id % self._num_slots * self.ring.num_lanes + lane
        found = self._all_ages.take(index)
        return found if self.finals is None else found.clamp(min=0)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Return which live rows are the last of their trajectory."""
        return self.age(lane, row_id + 1) == 0

    def finals_of(self, names: Iterable[str]) -> EndedRows | None:
        """Return the final observations if they have all of some fields."""
        return self.finals if self.finals is not None and all(name in self.finals.schema for name in names) else None

    def ends_for(self, names: Iterable[str], is_marked: bool) -> str:
        """Return the `ends` of an `Extent` for draws that need some fields one row later, or mark where they lack."""
        if is_marked:
            return "always"
        return "never" if self.finals_of(names) is None else "known"

    def restore_finals(self, schema: Schema, keys: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Take over final observations of live rows, as `EndedRows.live` gives them.

        Raises:
            SchemaError: They are not as it gives them.
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
        """Where a trajectory ended, replace what follows: by its final observation, else by the last row itself.

        Args:
            following: `[n, *event]` per field, one row after each of the last ones; they are changed.
            last_rows: Returns a field of the last rows; None if `following` has it already where `drawn` ended.
            drawn: The rows.
            is_marked: Whether ends without a final observation were drawn as well.

        Returns:
            `[n]` bool, of which rows now a following one is known; None if of all.
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
        return ~ended if finals is None else ~ended | is_known

    def draw(self, num_draws: int, extent: Extent, generator: torch.Generator) -> Drawn | None:
        """Draw rows uniformly over all that have the rows around them that `extent` asks for, with replacement.

        Args:
            num_draws: How many.
            extent: What must be around a row.
            generator: Draws the candidates; on the ring's device.

        Returns:
            The rows; None if no row is valid.
        """
        length = extent.num_before + 1
        candidates = self._candidates(length)
        drawn, codes = self._reject(num_draws, candidates, self._judge(extent, candidates), generator, extent)
        if drawn is None:
            return None
        lane, row = self._decode(tensor_of(drawn), length)
        if codes is None:
            return Drawn(lane, row, extent.num_after)
        return _with_codes(lane, row, tensor_of(codes), extent.num_after)

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> Any:
        """Draw windows inside one trajectory uniformly; return where in the ring's memory their first rows lie.

        They come as `own` gives them; None if no window is valid.
        """
        drawn, _ = self._reject(
            num_draws, self._candidates(length), self._judge_inside(length), generator, ("windows", length)
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
        """Draw a trajectory uniformly, over those whose live part has `length` rows, then a window of it uniformly.

        `ends` says for which ended trajectories windows may reach one row beyond the last, as if there was one; see
        `Extent`. Returns (lane, id of the last row); None if no trajectory is valid.
        """
        assert self._segments is not None, "created with keeps_segments=True"
        ring = self.ring
        segments = self._segments
        num_ended = segments.num_live()

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Return the lane, last row and number of rows of trajectories: those that ended, then one of each lane."""
            is_open = candidate >= num_ended
            place = segments.places(num_ended, torch.where(is_open, 0, candidate))
            lane, last = segments.named(place)
            lane = torch.where(is_open, candidate - num_ended, lane)
            last = torch.where(is_open, ring.total - 1, last)
            num_rows = torch.where(is_open, self.age(lane, last + 1).long(), segments.take("num_rows", place))
            num_rows = torch.minimum(num_rows, last - ring.oldest + 1)
            if ends == "never":
                return lane, last, num_rows
            goes_on = ~is_open
            if ends == "known":
                goes_on = goes_on & (self._marks(lane, last) < 0)
            return lane, last + goes_on, num_rows + goes_on

        def judge(candidate: Any) -> tuple[Any, Any]:
            return own(decode(tensor_of(candidate))[2] >= length), None

        if self._is_on_cpu:
            candidates: Any = (0, num_ended + ring.num_lanes)
        else:
            candidates = lambda num, generator: random_bits(num, generator) % (num_ended + ring.num_lanes)  # noqa: E731
        drawn, _ = self._reject(num_draws, candidates, judge, generator, ("trajectories", length, ends))
        if drawn is None:
            return None
        lane, last, num_rows = decode(tensor_of(drawn))
        return lane, last - below(num_rows - length + 1, generator)

    def follow(self, lane: torch.Tensor, row: torch.Tensor) -> Drawn:
        """Look at what follows live rows: the next row, or the end of the trajectory."""
        marks = self._marks(lane, row)
        ended = marks <= 0
        return Drawn(lane, row, (~ended).long(), ended, (-marks.long()).clamp_(min=0))

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """List every valid window, lane by lane, oldest first: (lane, id of the last row)."""
        listed, _ = _list(self._candidates(length), self._judge_inside(length), self.ring.device)
        lane, last = self._decode(tensor_of(listed), length)
        order = lane.argsort(stable=True)
        return lane[order], last[order]

    # Writing.

    def _later_ages(self, ends: Any, first_ages: Any) -> tuple[Any, Any]:
        """Return the ages of `[n, lanes]` rows, and of those one row later."""
        num_rows = len(ends)
        # The step since which a lane's trajectory lasts: below 0 where it began before these rows.
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
        """Keep final observations; return the ages of the rows behind `[n, lanes]` rows where these ended."""
        if self._is_on_cpu and not ends.any():
            return np.zeros(ends.shape, np.int32)
        ended = tensor_of(ends)
        if self.finals is None:
            self.finals = EndedRows(self.ring, final.schema)
        moved = self.finals.make_room(ended)
        if moved is not None:
            self._write_places(moved)
        leaves = {name: leaf.to(ended.device) for name, leaf in zip(final.schema, final.tensors, strict=True)}
        rows, places, lost = self.finals.append(ended, leaves)
        if lost is not None:
            index = torch.where(lost >= 0, (lost + self.ring.num_lanes) % self.ages.numel(), self.ages.numel())
            self._all_ages.index_fill_(0, index, 0)
            self.num_lost_finals = self.num_lost_finals + (lost >= 0).sum()
            return (-places).to(torch.int32).view(ended.shape)
        begins = torch.zeros(ended.numel(), dtype=torch.int32, device=ended.device)
        begins[rows] = (-places).to(torch.int32)
        return own(begins.view(ended.shape))

    def _write_places(self, keys: torch.Tensor) -> None:
        """Write the places of all final observations, whose keys these are, behind the live ones of their rows."""
        ring = self.ring
        is_live = keys >= ring.oldest * ring.num_lanes
        index = torch.where(is_live, (keys + ring.num_lanes) % self.ages.numel(), self.ages.numel())
        self._all_ages[index] = torch.arange(0, -len(keys), -1, dtype=torch.int32, device=keys.device)

    # Drawing.

    def _marks(self, lane: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return the ages of the rows that follow, below 0 where a final observation is kept."""
        return self._all_ages.take((row + 1) % self._num_slots * self.ring.num_lanes + lane)

    def _candidates(self, length: int) -> tuple[int, int]:
        """Return the first candidate, and how many there are: windows of live rows, row by row, and the lanes of each.

        A window's candidate is where the age of its last row lies, on from the oldest window's across the ring's end.
        """
        ring = self.ring
        first = (ring.oldest + length - 1) % self._num_slots
        return first * ring.num_lanes, max(ring.num_live - length + 1, 0) * ring.num_lanes

    def _shift(self, length: int) -> int:
        """Return what the row of a candidate lacks to the id of the window's last row."""
        first = self.ring.oldest + length - 1
        return first - first % self._num_slots

    def _decode(self, candidate: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lane and the last row of candidates."""
        row = torch.div(candidate, self.ring.num_lanes, rounding_mode="floor")
        return add_multiple(candidate, row, -self.ring.num_lanes), row + self._shift(length)

    def _judge_inside(self, length: int) -> _Judge:
        """Accept windows inside one trajectory."""
        ages = self._flat_ages
        least = length - 1 if length > 1 else _LEAST_AGE
        if isinstance(ages, torch.Tensor):
            return lambda candidate: (ages.take(candidate % len(ages)) >= least, None)
        return lambda candidate: (ages.take(candidate, mode="wrap") >= least, None)

    def _judge(self, extent: Extent, candidates: tuple[int, int]) -> _Judge:
        """Accept rows that have the rows around them that `extent` asks for."""
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
        """Return what follows candidates: how many rows of their trajectory, at most `num_after`, in the upper bits.

        The lower bits are the place of the final observation if the trajectory ends with these, 0 if that is not known,
        and 1 if it goes on. Behind the last row that was written anything is found.
        """
        lib = self._library
        ages = self._flat_ages
        lanes = self.ring.num_lanes
        goes_on = (num_after << _PLACE_BITS) + 1
        if num_after == 1:
            marks = ages.take((candidate + lanes) % len(ages))
            return lib.where(marks > 0, goes_on, -marks.astype(np.int64) if lib is np else -marks.long())
        if num_after not in self._steps:
            self._steps[num_after] = self._new_steps(num_after)
        steps, numbers = self._steps[num_after]
        marks = ages.take((candidate[:, None] + steps) % len(ages))
        return lib.amin(lib.where(marks > 0, goes_on, numbers - marks), 1)

    @lasting
    def _new_steps(self, num_after: int) -> tuple[Any, Any]:
        """Make steps to later rows among the ages, and their numbers from 0 on where codes have them.

        On a device the first draw of a kind waits, so that all streams may use them afterwards.
        """
        lanes = self.ring.num_lanes
        device = self.ring.device
        steps = torch.arange(lanes, num_after * lanes + 1, lanes, device=device)
        return own(steps), own(torch.arange(0, num_after << _PLACE_BITS, 1 << _PLACE_BITS, device=device))

    def _reject(
        self,
        num_draws: int,
        candidates: tuple[int, int] | _Propose,
        judge: _Judge,
        generator: torch.Generator,
        name: Any,
    ) -> tuple[Any, Any]:
        """Draw uniformly over the accepted ones of some candidates; (None, None) if there are none.

        Args:
            num_draws: How many.
            candidates: The first one and how many there are; or a function that draws some.
            judge: Accepts candidates.
            generator: Draws.
            name: Names the kind of draw.

        Returns:
            The candidates and their codes.
        """
        if isinstance(candidates, tuple) and not candidates[1]:
            return None, None
        kind = None if self._is_on_cpu else self._kind(name)
        if kind is not None:
            self._read_number(kind)
            size = kind.num_candidates(num_draws)
            if 0 < size <= max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
                return self._reject_without_waiting(kind, num_draws, size, candidates, judge, generator)
            if kind.numbers is None:
                kind.numbers = torch.arange(num_draws, device=self.ring.device)
        num_proposed = 0
        missing = num_draws
        found: list[tuple[Any, Any]] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # Four standard deviations more than are enough on average: a second round costs more than they do.
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
            found.append((accepted[:missing], None if codes is None else codes[flags][:missing]))
            if num_accepted >= missing:
                return found[0] if len(found) == 1 else _joined(found)
            num_proposed += size
            missing -= num_accepted
        if not isinstance(candidates, tuple):
            assert self._segments is not None
            candidates = (0, int(self._segments.num_live()) + self.ring.num_lanes)
        listed, codes = _list(candidates, judge, self.ring.device)
        if not len(listed):
            return None, None
        chosen = own(uniform(len(listed), missing, generator))
        found.append((listed[chosen], None if codes is None else codes[chosen]))
        return _joined(found)

    def _propose(self, size: int, candidates: tuple[int, int] | _Propose, generator: torch.Generator) -> Any:
        """Draw candidates."""
        if not isinstance(candidates, tuple):
            return candidates(size, generator)
        first, num_candidates = candidates
        if not self._is_on_cpu:  # not memory that is kept: another stream may still read it
            memory = torch.empty(size, dtype=torch.int64, device=self.ring.device)
        else:
            memory = self._memories[size] if size in self._memories else self._memory_for(size)
        return own(fill_uniform(memory, num_candidates, generator, first))

    def _kind(self, name: Any) -> _Kind:
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[name] = _Kind(self.ring.device)
        return kind

    def _read_number(self, kind: _Kind) -> None:
        """Take over how many candidates an earlier draw accepted, if that has arrived."""
        received = kind.late_number.receive()
        if received is None:
            return
        num_accepted, (size, num_draws) = received
        kind.note(num_accepted, size)
        self.share = max(kind.share, _LEAST_SHARE / _WHOLE_SHARE)
        if num_accepted < num_draws:
            self.num_short_draws += 1
            kind.num_judged = 0
        if not num_accepted:
            expected = "a valid row or window"
            got = "none at an earlier call, whose batch must not be used"
            raise UsageError("sample from a ring", "", expected, got, "Add more rows")

    def _reject_without_waiting(
        self,
        kind: _Kind,
        num_draws: int,
        size: int,
        candidates: tuple[int, int] | _Propose,
        judge: _Judge,
        generator: torch.Generator,
    ) -> tuple[Any, Any]:
        """Draw from `size` candidates, of which enough are accepted; if not, the first accepted ones repeat."""
        # The last candidate is not judged. It stands in where none is accepted; the next call raises then.
        proposed = self._propose(size + 1, candidates, generator)
        flags, codes = judge(proposed)
        rank = flags[:-1].cumsum(0)
        num_accepted = rank[-1]
        if kind.late_number.is_free:
            kind.late_number.send(num_accepted, (size, num_draws))
        numbers = kind.numbers
        if numbers is None or len(numbers) != num_draws:
            numbers = torch.arange(num_draws, device=rank.device)
        chosen = torch.searchsorted(rank, numbers % num_accepted.clamp(min=1), right=True)
        return proposed.index_select(0, chosen), None if codes is None else codes.index_select(0, chosen)

    @lasting
    def _memory_for(self, size: int) -> torch.Tensor:
        """Make memory for candidates, which is kept; fresh memory takes 2 of 24 us of 32 transitions."""
        if len(self._memories) >= _MAX_MEMORIES:
            self._memories.clear()
        found = self._memories[size] = torch.empty(size, dtype=torch.int64, device=self.ring.device)
        return found


def _replace(leaf: torch.Tensor, flags: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor) -> None:
    """Replace the rows of a leaf `[n, *event]` where `[n]` flags are set.

    Args:
        leaf: Changed.
        flags: Of all rows.
        rows: Where they are set; None if the host does not know.
        values: New values, of these rows or of all.
    """
    if rows is None:
        wide = flags.view(-1, *[1] * (leaf.dim() - 1))
        torch.where(wide, signed(values), signed(leaf), out=signed(leaf))
    elif len(rows):
        signed(leaf)[rows] = signed(values)


def _with_codes(lane: torch.Tensor, row: torch.Tensor, codes: torch.Tensor, num_after: int) -> Drawn:
    num_ahead = codes >> _PLACE_BITS
    return Drawn(lane, row, num_ahead, num_ahead < num_after, codes & _PLACE)


def _list(candidates: tuple[int, int], judge: _Judge, device: torch.device) -> tuple[Any, Any]:
    """List every accepted candidate in order, and their codes."""
    found: list[tuple[Any, Any]] = []
    start = candidates[0]
    end = sum(candidates)
    while start < end or not found:
        stop = min(start + _NUM_LISTED, end)
        listed = own(torch.arange(start, stop, device=device))
        flags, codes = judge(listed)
        found.append((listed[flags], None if codes is None else codes[flags]))
        start = stop
    return _joined(found)


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    def joined(pieces: list[Any]) -> Any:
        if pieces[0] is None:
            return None
        return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else np.concatenate(pieces)

    return joined([rows for rows, _ in parts]), joined([codes for _, codes in parts])
