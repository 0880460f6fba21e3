"""Which windows are inside one trajectory: the age column, and exact draws from it.

One rule: the age of a row is the number of rows since its trajectory began; a window of L rows
that ends at row e is valid if and only if `age[e] >= L - 1` and its first row is live. No list of
boundaries is kept or searched, so that neither writing nor drawing costs more in a larger ring.
Only this file knows window bounds, and `pairs.py` those of two rows.

Draws are by rejection: candidates are uniform over a superset of what is valid, each is accepted
if it is valid, and the first accepted ones are taken. Accepted candidates are independent and
uniform over the valid ones whatever the rate of acceptance is, and the rate itself decides only how
many candidates are proposed, so that the law is exact. Where next to nothing is valid, the
candidates are listed once instead, which is the same law; if none is, the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ..core.host_arrays import zeroed
from ..core.modes import lasting
from ..core.samplers import fill_uniform, uniform
from .pairs import Pairs
from .ring import RingStore
from .segments import Segments

#: (lane, row id of the window's last row) -> whether the window is valid.
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Candidates -> which are accepted.
_Accept = Callable[[torch.Tensor], torch.Tensor]
#: Candidates that are proposed in vain before all are listed: so many, and so many per draw.
_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW = 1 << 16, 64
#: So many sizes of rounds have memory ready for them.
_MAX_SIZES = 16
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
        self._num_seen = 0
        self.rejection = Rejection()
        is_cpu = ring.device.type == "cpu"
        self._arrays = (self.ages.numpy(), self.next_ages.numpy()) if is_cpu else None
        self._flat_ages = self._arrays[0].reshape(-1) if self._arrays is not None else np.empty(0, np.int32)
        #: Found when pairs are first drawn, and kept from then on.
        self._pairs: Pairs | None = None
        #: What so many candidates are drawn into, as a tensor and as an array.
        self._candidates: dict[int, tuple[torch.Tensor, npt.NDArray[np.int64]]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that is reserved for what is known of rows."""
        return self.ages.nbytes + (self._pairs.followed.nbytes if self._pairs is not None else 0)

    def note(self, ends: torch.Tensor) -> None:
        """Note rows that are about to be written: `ends` is `[n, lanes]` bool. Call it before the ring's `write`."""
        if self.segments is not None:
            self.segments.note(ends.cpu().numpy(), self.next_ages, self.ring.total)
        self._note_many(ends, self.ring.total)
        self._count(len(ends))

    def note_arrays(self, ends: npt.NDArray[np.bool_]) -> None:
        """Note rows as `note` does, `[n]` with one lane, else `[n, lanes]`, where the memory is on the CPU.

        n is at most `num_slots`.
        """
        assert self._arrays is not None
        ages, next_ages = self._arrays
        num_rows, slots = len(ends), self.ring.num_slots
        slot, has_ends = self.ring.total % slots, ends[0] if ends.size == 1 else ends.any()
        if has_ends and self.segments is not None:
            self.segments.note(ends.reshape(num_rows, -1), self.next_ages, self.ring.total)
        if num_rows == 1:
            ages[slot] = next_ages
            if self._pairs is not None:
                self._pairs.note(self.ring.total, ages[slot : slot + 1])
            next_ages += 1
            if has_ends:
                next_ages[ends.reshape(-1)] = 0
        else:
            # One lane alone is one axis, along which numpy is several times quicker.
            is_alone = len(next_ages) == 1
            column, first_age = (ages[:, 0], next_ages[0]) if is_alone else (ages, next_ages)
            steps = np.arange(num_rows + 1, dtype=np.int32)
            steps = steps if is_alone else steps[:, None]
            # The step since which a lane's trajectory lasts: below 0 where it began before these rows.
            begun = np.empty((num_rows + 1, *column.shape[1:]), np.int32)
            begun[0] = -first_age
            begun[1:] = np.where(ends, steps[1:], -first_age) if has_ends else -first_age
            if has_ends:
                np.maximum.accumulate(begun, axis=0, out=begun)
            following = np.subtract(steps, begun, out=begun)
            num_first = min(num_rows, slots - slot)
            column[slot : slot + num_first] = following[:num_first]
            column[: num_rows - num_first] = following[num_first:-1]
            next_ages[:] = following[-1]
            if self._pairs is not None:
                self._pairs.note(self.ring.total, following[:-1].reshape(num_rows, -1))
        self._count(num_rows)

    def note_row(self, is_end: bool) -> None:
        """Note one row of one lane as `note_arrays` does, in a third of the time."""
        assert self._arrays is not None
        ring, next_ages = self.ring, self._arrays[1]
        if is_end and self.segments is not None:
            self.segments.note(np.ones((1, 1), bool), self.next_ages, ring.total)
        age, slot = next_ages.item(), ring.total % ring.num_slots
        self._flat_ages[slot] = age
        if self._pairs is not None:
            self._pairs.note_row(slot, age != 0)
        next_ages[0] = 0 if is_end else age + 1
        self._count(1)

    def _count(self, num_rows: int) -> None:
        """Keep ages from overflowing."""
        self._num_seen += num_rows
        if self._num_seen >= _MAX_AGE:
            self.next_ages.clamp_(max=_MAX_AGE)
            self._num_seen = 0

    def clear(self) -> None:
        """Forget every row."""
        self.next_ages.zero_()
        if self.segments is not None:
            self.segments.clear()

    def age(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Give the ages of live rows, or of the rows that come next."""
        slots, lanes = self.ring.num_slots, self.ring.num_lanes
        index = row_id % slots if lanes == 1 else row_id % slots * lanes + lane
        found = self.ages.view(-1).index_select(0, index.flatten()).view(index.shape)
        if self.ring.device.type == "cpu" and not bool((row_id >= self.ring.total).any()):
            return found
        return torch.where(row_id >= self.ring.total, self.next_ages[lane], found)

    def ended(self, lane: torch.Tensor, row_id: torch.Tensor) -> torch.Tensor:
        """Tell which live rows are the last of their trajectory."""
        return self.age(lane, row_id + 1) == 0

    def rule(self, length: int) -> Rule:
        """Say when a window of live rows is inside one trajectory."""
        slots, lanes = self.ring.num_slots, self.ring.num_lanes
        ages = self.ages.view(-1)

        def is_inside(lane: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            index = last % slots if lanes == 1 else (last % slots).mul_(lanes).add_(lane)
            return ages.index_select(0, index) >= length - 1

        return is_inside

    def draw(
        self, num_draws: int, length: int, generator: torch.Generator, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw windows uniformly over all that are valid, with replacement.

        Args:
            num_draws: How many.
            length: Rows of a window; its first row must be live.
            generator: Draws the candidates; on the ring's device.
            rule: When a window is valid; `self.rule(length)` if inside one trajectory.

        Returns:
            (lane, id of the last row), `[num_draws]` int64 each; None if no window is valid.
        """
        num_candidates, decode = self._candidates_of(length)
        if not num_candidates:
            return None
        drawn = self.rejection.draw(num_draws, num_candidates, lambda c: rule(*decode(c)), generator)
        return None if drawn is None else decode(drawn)

    def _candidates_of(self, length: int) -> tuple[int, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
        """Count the windows of live rows, and say how to find the lane and the last row of each."""
        places = max(self.ring.num_live - length + 1, 0)
        first, lanes = self.ring.oldest + length - 1, self.ring.num_lanes

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if lanes == 1:
                return torch.zeros_like(candidate), candidate + first
            lane = torch.div(candidate, max(places, 1), rounding_mode="floor")
            return lane, (candidate - lane * places).add_(first)

        return places * lanes, decode

    def draw_places(self, num_draws: int, length: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw windows inside one trajectory as `draw` does; give where in the ring's memory their first rows lie."""
        if self._arrays is not None:
            places = self._draw_at_once(num_draws, length, generator)
            if places is not None:
                return torch.from_numpy(places)
        drawn = self.draw(num_draws, length, generator, self.rule(length))
        return None if drawn is None else self.ring.place(drawn[0], drawn[1] - (length - 1))

    def _draw_at_once(self, num_draws: int, length: int, generator: torch.Generator) -> npt.NDArray[np.int64] | None:
        """Draw places as `draw_places` does, in one round and with numpy: half the time; None if one is not enough.

        Candidates are rows as their ages lie, `slot * num_lanes + lane`: the first of two, which are asked for most
        and are known beforehand, or else the last one, from that of the oldest window on, where slots go on counting
        as the ring closes. A round that is not enough is thrown away whole. That changes no law: whether it was
        enough depends on how many candidates are valid, not on which.
        """
        ring, share = self.ring, self.rejection.share
        slots, lanes, total = ring.num_slots, ring.num_lanes, ring.total
        num_live, back = (slots if total > slots else total), length - 1
        # Four standard deviations more than are enough on average; a multiple of some, so that few sizes are asked for.
        size = int((num_draws + 4 * (num_draws * (1 - share)) ** 0.5) / share + 8) // 8 * 8
        if size > _MAX_CANDIDATES or num_live <= back:
            return None
        candidates, index = self._candidates.get(size) or self._make_candidates(size)
        if back == 1:
            pairs = self._pairs
            if pairs is None:
                pairs = self._pairs = Pairs(ring, self.ages.numpy())
            fill_uniform(candidates, num_live * lanes, generator)
            index = index.compress(pairs.followed.take(index, mode="clip"))
        else:
            first = ((total - num_live) % slots + back) * lanes
            fill_uniform(candidates, (num_live - back) * lanes, generator, first)
            index = index.compress(self._flat_ages.take(index, mode="wrap") >= back)
        num_valid = len(index)
        self.rejection.note(num_valid / size)
        if num_valid < num_draws:
            return None
        index = index[:num_draws]
        if back == lanes == 1:
            return index
        if back != 1:
            index -= back * lanes
        slot, lane = (index, None) if lanes == 1 else np.divmod(index, lanes)
        places: npt.NDArray[np.int64] = ring.place(lane, slot)
        return places

    @lasting
    def _make_candidates(self, size: int) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        if len(self._candidates) >= _MAX_SIZES:
            self._candidates.clear()
        candidates = torch.empty(size, dtype=torch.int64, device="cpu")
        made = self._candidates[size] = candidates, candidates.numpy()
        return made

    def draw_by_trajectory(
        self, num_draws: int, length: int, generator: torch.Generator, goes_on: Rule | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw a trajectory uniformly, over those whose live part has `length` rows, then a window of it uniformly.

        `goes_on` says of which ended trajectories windows may reach one row beyond the last, as if there was one.
        """
        assert self.segments is not None, "created with keeps_segments=True"
        lane, last, age = self.segments.listed()
        oldest, total = self.ring.oldest, self.ring.total
        num_ended = len(lane)

        def decode(candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            if not num_ended:
                its_last = torch.full_like(candidate, total - 1)
                return candidate, its_last, self.next_ages[candidate].long().clamp(max=total - oldest)
            is_open = candidate >= num_ended
            of_lane = torch.where(is_open, candidate - num_ended, 0)
            place = torch.where(is_open, 0, candidate)
            its_lane = torch.where(is_open, of_lane, lane[place])
            its_last = torch.where(is_open, total - 1, last[place])
            num_rows = torch.where(is_open, self.next_ages[of_lane].long(), age[place])
            more = 0 if goes_on is None else (~is_open & goes_on(lane[place], last[place])).long()
            return its_lane, its_last + more, torch.minimum(num_rows, its_last - oldest + 1) + more

        def is_long_enough(candidate: torch.Tensor) -> torch.Tensor:
            return decode(candidate)[2] >= length

        drawn = self.rejection.draw(num_draws, num_ended + self.ring.num_lanes, is_long_enough, generator)
        if drawn is None:
            return None
        its_lane, its_last, num_rows = decode(drawn)
        choices = num_rows - length + 1
        # The remainder of 62 random bits is uniform to one part in 2 ** 62 / choices.
        back = torch.randint(1 << 62, (num_draws,), generator=generator, device=self.ring.device) % choices
        return its_lane, its_last - back

    def list_all(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """List every valid window, lane by lane, oldest first: (lane, id of the last row)."""
        num_candidates, decode = self._candidates_of(length)
        is_valid = self.rule(length)
        return decode(_list(num_candidates, lambda c: is_valid(*decode(c)), self.ring.device))

    def _note_many(self, ends: torch.Tensor, total: int) -> None:
        num_rows, slots = len(ends), self.ring.num_slots
        if not num_rows:  # a buffer that was cleared is loaded
            return
        ends = ends.to(self.ring.device)
        steps = torch.arange(1, num_rows + 1, dtype=torch.int32, device=self.ring.device).unsqueeze(1)
        # After row t: the number of rows up to the last end, 0 if none ended yet.
        cut = torch.cummax(torch.where(ends, steps, 0), 0).values
        following = torch.where(cut > 0, steps - cut, self.next_ages + steps)
        ages = torch.cat([self.next_ages.unsqueeze(0), following[:-1]])
        kept = min(num_rows, slots)
        slot = torch.arange(total + num_rows - kept, total + num_rows, device=self.ring.device) % slots
        self.ages[slot] = ages[num_rows - kept :]
        if self._pairs is not None:
            self._pairs.note(total + num_rows - kept, ages[num_rows - kept :].numpy())
        self.next_ages.copy_(following[-1])


class Rejection:
    """Draw by proposing and accepting.

    Attributes:
        share: How many were accepted lately, to propose about enough next time. Saved with the random
            state, as both say which numbers come next.
    """

    def __init__(self) -> None:
        self.share = 0.9

    def note(self, share: float) -> None:
        """Note how many of a round's candidates were accepted."""
        share = 0.8 * self.share + 0.2 * share
        self.share = share if share > 1e-3 else 1e-3

    def draw(
        self, num_draws: int, num_candidates: int, accept: _Accept, generator: torch.Generator
    ) -> torch.Tensor | None:
        """Draw uniformly over the accepted candidates of `range(num_candidates)`; None if there are none."""
        device, num_proposed, missing = generator.device, 0, num_draws
        found: list[torch.Tensor] = []
        while num_proposed < max(_MAX_CANDIDATES, _MAX_CANDIDATES_PER_DRAW * num_draws):
            # A few percent more than needed on average: a second round costs more than they do.
            size = min(int(missing / self.share * 1.05) + 8, _MAX_CANDIDATES)
            candidate = uniform(num_candidates, size, generator)
            accepted = candidate[accept(candidate)]
            self.note(accepted.shape[0] / size)
            num_proposed += size
            if accepted.shape[0] >= missing and not found:
                return accepted[:missing]
            found.append(accepted[:missing])
            missing -= found[-1].shape[0]
            if missing == 0:
                return torch.cat(found)
        listed = _list(num_candidates, accept, device)
        if not len(listed):
            return None
        found.append(listed[uniform(len(listed), missing, generator)])
        return torch.cat(found)


def _list(num_candidates: int, accept: _Accept, device: torch.device) -> torch.Tensor:
    """List every accepted candidate in order."""
    found = [torch.empty(0, dtype=torch.int64, device=device)]
    for start in range(0, num_candidates, _NUM_LISTED):
        candidate = torch.arange(start, min(start + _NUM_LISTED, num_candidates), device=device)
        found.append(candidate[accept(candidate)])
    return torch.cat(found)
