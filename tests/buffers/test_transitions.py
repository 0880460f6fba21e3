"""Transitions compared with a naive model: the next row, the final observation, or no next
observation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import DictBuffer, TrajectoryDictBufferMultiDim, TransitionRequest, UsageError

GAMMA = 0.9
FINAL = 1_000_000


class Model:
    """All rows that were ever added, per lane."""

    def __init__(self, capacity: int, lanes: int) -> None:
        self.slots, self.lanes = capacity // lanes, lanes
        self.ends: list[list[bool]] = []
        self.has_final: list[bool] = []

    @property
    def total(self) -> int:
        return len(self.ends)

    def expected(self, num_steps: int, at_end: str, num_frames: int) -> dict[tuple[int, int], dict]:
        result = {}
        oldest = max(0, self.total - self.slots)
        for lane in range(self.lanes):
            for first in range(oldest, self.total):
                taken = next(
                    (k + 1 for k in range(num_steps) if self.ended(lane, first + k)), num_steps
                )
                last = first + taken - 1
                ended = self.ended(lane, last)
                begin = first
                while begin > 0 and not self.ends[begin - 1][lane]:
                    begin -= 1
                if max(begin, first - num_frames + 1) < oldest:
                    continue
                if ended:
                    known = self.has_final[last]
                    if not known and at_end == "exclude":
                        continue
                    following = FINAL + last if known else last
                elif first + num_steps < self.total:
                    known, following = True, first + num_steps
                else:
                    continue
                result[lane, first] = {
                    "taken": taken,
                    "ended": ended,
                    "known": known,
                    "following": following,
                    "frames": [max(begin, first - back) for back in range(num_frames - 1, -1, -1)],
                    "next_frames": [
                        max(begin, last + 1 - back) for back in range(num_frames - 1, 0, -1)
                    ]
                    + [following],
                }
        return result

    def ended(self, lane: int, row: int) -> bool:
        return row < self.total and self.ends[row][lane]


def fill(
    buffer: DictBuffer, model: Model, sizes: list[int], seed: int, has_lane_axis: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, size in enumerate(sizes):
        ends = torch.rand(size, model.lanes, generator=generator) < 0.3
        row = torch.arange(model.total, model.total + size).unsqueeze(1).expand(size, model.lanes)
        lane = torch.arange(model.lanes).expand(size, model.lanes)
        data = {
            "observation": torch.stack([lane, row], -1).float(),
            "reward": (row + 1.0).unsqueeze(-1),
            "terminated": ends.unsqueeze(-1),
            "truncated": torch.zeros_like(ends).unsqueeze(-1),
        }
        gives_final = (number + seed) % 2 == 0
        final = {"observation": torch.stack([lane, row + FINAL], -1).float()}
        if not has_lane_axis:
            data = {name: leaf.flatten(0, 1) for name, leaf in data.items()}
            final = {name: leaf.flatten(0, 1) for name, leaf in final.items()}
        buffer.extend(data, final=final if gives_final else None)
        model.ends += ends.tolist()
        model.has_final += [gives_final] * size


@settings(max_examples=80)
@given(
    lanes=st.integers(1, 3),
    slots=st.integers(1, 9),
    sizes=st.lists(st.integers(0, 14), min_size=1, max_size=7),
    seed=st.integers(0, 100),
    num_steps=st.integers(1, 4),
    num_frames=st.integers(1, 3),
    at_end=st.sampled_from(["exclude", "mark"]),
    has_lane_axis=st.booleans(),
)
def test_transitions_equal_naive_transitions(
    lanes: int,
    slots: int,
    sizes: list[int],
    seed: int,
    num_steps: int,
    num_frames: int,
    at_end: str,
    has_lane_axis: bool,
) -> None:
    model = Model(slots * lanes, lanes)
    ends = ["terminated", "truncated"]
    if has_lane_axis:
        buffer: DictBuffer = TrajectoryDictBufferMultiDim(
            capacity=slots, n_dim=2, end_key=ends, generator=seed
        )
    else:
        buffer = DictBuffer(capacity=slots * lanes, num_envs=lanes, end_key=ends, generator=seed)
    fill(buffer, model, sizes, seed, has_lane_axis)
    expected = model.expected(num_steps, at_end, num_frames)
    options = {"num_steps": num_steps, "num_frames": num_frames, "at_end": at_end, "gamma": GAMMA}
    if not expected:
        with pytest.raises(UsageError):
            buffer.sample_transitions(5, **options)
        return
    batch = buffer.sample_transitions(40 * len(expected) + 100, **options)
    observation = batch["observation"].view(len(batch["reward"]), num_frames, 2).long()
    following = batch["next"]["observation"].view(len(observation), num_frames, 2).long()
    seen = set()
    for i in range(len(observation)):
        lane, first = observation[i, -1].tolist()
        want = expected[lane, first]
        seen.add((lane, first))
        assert observation[i, :, 1].tolist() == want["frames"]
        assert (
            following[i, :, 1].tolist() == want["next_frames"]
            and (following[i, :, 0] == lane).all()
        )
        assert bool(batch["terminated"][i]) == want["ended"]
        if at_end == "mark":
            assert bool(batch["next_valid"][i]) == want["known"]
        reward = sum((first + k + 1) * GAMMA**k for k in range(want["taken"]))
        assert float(batch["reward"][i]) == pytest.approx(reward, rel=1e-5)
        if num_steps > 1:
            # The only end flag that is set here is `terminated`.
            discount = 0 if want["ended"] else GAMMA ** want["taken"]
            assert float(batch["discount"][i]) == pytest.approx(discount, rel=1e-5)
    assert seen == set(expected)


#: End keys, flags of a step that ends its trajectory -> whether the trajectory terminated with it.
ENDS = [
    (["terminated", "truncated"], {"terminated": True, "truncated": False}, True),
    (["terminated", "truncated"], {"terminated": False, "truncated": True}, False),
    (["terminated", "truncated"], {"terminated": True, "truncated": True}, True),
    (["terminals", "timeouts"], {"terminals": False, "timeouts": True}, False),
    ("done", {"done": True}, True),
    ("done", {"done": 1.0}, True),
    ("done", {"done": True, "time_outs": True}, False),
    ("done", {"done": True, "time_outs": False}, True),
    ("done", {"done": True, "truncated": 1}, False),
    ("done", {"done": True, "terminated": False}, False),
    ("done", {"done": True, "terminated": True, "truncated": True}, True),
    ("dones", {"dones": True, "infos": {"TimeLimit.truncated": True}}, False),
    ("dones", {"dones": True, "extras": {"time_outs": False}}, True),
    ("truncated", {"truncated": True}, False),
    ("truncated", {"truncated": True, "terminated": True}, True),
    (["success", "truncated"], {"success": True, "truncated": False}, True),
    (["success", "truncated"], {"success": True, "truncated": True}, False),
    (["success", "terminated"], {"success": True, "terminated": False}, True),
    ("is_last", {"is_last": True, "is_terminal": False}, False),
    ("is_last", {"is_last": True, "is_terminal": True}, True),
    (("next", "done"), {"next": {"done": True, "truncated": True}}, False),
    # Flags of the step before, and of a part of the observation. Neither concerns this end.
    (("next", "done"), {"truncated": True, "next": {"done": True}}, True),
    ("done", {"done": True, "observation": {"timeout": True}}, True),
]


@pytest.mark.parametrize("has_lane_axis", [False, True])
@pytest.mark.parametrize(("end_key", "last", "is_terminated"), ENDS)
def test_a_discount_is_0_where_a_trajectory_terminated(end_key, last, is_terminated, has_lane_axis):
    lead = (10, 1, 1) if has_lane_axis else (10, 1)
    ended = (torch.arange(10) % 5 == 4).view(lead)

    def columns(tree):
        return {key: columns(x) if isinstance(x, dict) else ended * x for key, x in tree.items()}

    number = torch.arange(10.0).view(lead)
    rows = {"step": number, "reward": torch.ones(lead), **columns(last)}
    if has_lane_axis:
        buffer: DictBuffer = TrajectoryDictBufferMultiDim(
            capacity=10, n_dim=2, end_key=end_key, generator=0
        )
    else:
        buffer = DictBuffer(capacity=10, end_key=end_key, generator=0)
    buffer.extend(rows, final={"step": number + 1})
    batch = buffer.sample_transitions(400, num_steps=3, gamma=0.5, next_keys=("step",))
    step = batch["step"].flatten().int()
    taken = (5 - step % 5).clamp(max=3)
    reaches_end = step % 5 >= 2
    factor = 0.5**taken * (0 if is_terminated else 1)
    assert torch.equal(batch["discount"].flatten(), torch.where(reaches_end, factor, 0.5**3))
    assert torch.equal(batch["next"]["step"].flatten().int(), step + taken)


def test_time_outs_of_transitions_are_those_of_their_last_step() -> None:
    buffer = DictBuffer(capacity=6, end_key="done", generator=0)
    row = torch.arange(6).view(6, 1)
    rows = {
        "observation": row.float(),
        "reward": torch.ones(6, 1),
        "done": row == 5,
        "time_outs": row == 5,
    }
    buffer.extend(rows, final={"observation": row + 1.0})
    batch = buffer.sample_transitions(100, num_steps=2, gamma=0.5)
    assert torch.equal(batch["time_outs"], batch["observation"] >= 4)
    assert torch.equal(batch["done"], batch["time_outs"])
    assert torch.equal(batch["discount"], torch.where(batch["observation"] == 5, 0.5, 0.25))


def test_a_marked_end_without_final_observation_has_its_discount() -> None:
    buffer = DictBuffer(capacity=8, end_key=["terminated", "truncated"], generator=0)
    row = torch.arange(8).view(8, 1)
    flags = {"terminated": row == 3, "truncated": row == 7}
    buffer.extend({"observation": row.float(), "reward": torch.ones(8, 1), **flags})
    batch = buffer.sample_transitions(200, num_steps=2, gamma=0.5, at_end="mark")
    first = batch["observation"].flatten()
    expected = torch.full_like(first, 0.25)
    expected[(first == 2) | (first == 3)] = 0
    expected[first == 7] = 0.5
    assert torch.equal(batch["discount"].flatten(), expected)


@pytest.mark.parametrize("has_finals", [False, True])
@pytest.mark.parametrize(("end_key", "last", "is_terminated"), ENDS)
def test_transitions_of_one_step_have_a_discount_if_gamma_is_given(
    end_key, last, is_terminated, has_finals
):
    ended = (torch.arange(10) % 5 == 4).view(10, 1)

    def columns(tree):
        return {key: columns(x) if isinstance(x, dict) else ended * x for key, x in tree.items()}

    number = torch.arange(10.0).view(10, 1)
    buffer = DictBuffer(capacity=10, end_key=end_key, generator=0)
    final = {"step": number + 1} if has_finals else None
    buffer.extend({"step": number, **columns(last)}, final=final)
    batch = buffer.sample_transitions(200, gamma=0.5, next_keys=("step",))
    ends = batch["step"] % 5 == 4
    assert bool(ends.any()) == has_finals
    assert torch.equal(batch["discount"], torch.where(ends, 0 if is_terminated else 0.5, 0.5))
    assert "discount" not in buffer.sample_transitions(5, next_keys=("step",))


@pytest.mark.parametrize("options", [{}, {"num_steps": 3}, {"num_frames": 2}, {"at_end": "mark"}])
@pytest.mark.parametrize(
    ("end_key", "other"), [("truncated", "terminated"), ("terminated", "time_outs")]
)
def test_an_end_that_end_key_does_not_name_is_refused(end_key, other, options) -> None:
    row = torch.arange(12).view(12, 1)
    rows = {"observation": row.float(), "reward": torch.ones(12, 1), end_key: row % 6 == 5}
    same = DictBuffer(capacity=12, end_key=end_key, generator=0)
    same.extend({**rows, other: row % 6 == 5}, final={"observation": row + 1.0})
    same.sample_transitions(200, **options)
    apart = DictBuffer(capacity=12, end_key=end_key, generator=0)
    apart.extend({**rows, other: row % 6 == 2}, final={"observation": row + 1.0})
    with pytest.raises(UsageError, match=f"'{other}' is set on rows .* Add it to end_key"):
        apart.sample_transitions(200, **options)


def test_memory_holds_the_observation_once() -> None:
    buffer = DictBuffer(capacity=20_000, end_key="done")
    row = {
        "observation": torch.zeros(1, 348),
        "action": torch.zeros(1, 17),
        "reward": torch.zeros(1, 1),
    }
    for _ in range(2):
        buffer.extend({**row, "done": torch.zeros(1, 1, dtype=torch.bool)})
    buffer.sample_transitions(1)
    minimum = 348 * 4 + 17 * 4 + 4 + 1
    assert buffer.num_bytes <= 1.02 * minimum * buffer.capacity


def test_a_reset_observation_is_never_a_next_observation() -> None:
    for at_end in ("exclude", "mark"):
        buffer = DictBuffer(capacity=100, end_key="done", generator=0)
        ends = (torch.arange(80) % 4 == 3).unsqueeze(1)
        buffer.extend({"observation": torch.arange(80.0).unsqueeze(1), "done": ends})
        batch = buffer.sample_transitions(4000, at_end=at_end)
        own, following = batch["observation"].flatten(), batch["next"]["observation"].flatten()
        is_reset = following % 4 == 0
        assert not is_reset.any()
        if at_end == "mark":
            assert torch.equal(batch["next_valid"].flatten(), own % 4 != 3)
            assert torch.equal(following[own % 4 == 3], own[own % 4 == 3])
        else:
            assert not (own % 4 == 3).any()


@pytest.mark.parametrize("at_end", ["exclude", "mark"])
def test_windows_reach_the_end_of_a_trajectory_with_final_observations(at_end: str) -> None:
    buffer = TrajectoryDictBufferMultiDim(capacity=20, n_dim=2, at_end=at_end, generator=0)
    ends = (torch.arange(20) % 5 == 4).view(20, 1, 1)
    row = torch.arange(20.0).view(20, 1, 1)
    buffer.extend(
        {"observation": row[:10], "done": ends[:10]}, final={"observation": row[:10] + 0.5}
    )
    buffer.extend({"observation": row[10:], "done": ends[10:]})
    batch = buffer.sample(3 * 3000, 3)
    first = batch["observation"].view(-1, 3)
    following = batch["next"]["observation"].view(-1, 3)
    reached = set(first[:, 2].int().tolist())
    expected = {2, 3, 4, 7, 8, 9, 12, 13, 17, 18} | ({14, 19} if at_end == "mark" else set())
    assert reached == expected
    known = following[:, 2][(first[:, 2] == 4) | (first[:, 2] == 9)]
    assert set(known.tolist()) == {4.5, 9.5}
    if at_end == "mark":
        marked = ~batch["next_valid"].view(-1, 3)
        assert set(first[:, 2][marked[:, 2]].tolist()) == {14.0, 19.0} and not marked[:, :2].any()


@pytest.mark.parametrize("at_end", ["exclude", "mark"])
@pytest.mark.parametrize("start_mode", ["uniform", "trajectory"])
def test_final_observations_must_have_all_next_keys(start_mode: str, at_end: str) -> None:
    keys = ["observation", "privileged"]
    buffer = TrajectoryDictBufferMultiDim(
        capacity=20,
        at_end=at_end,
        start_mode=start_mode,
        output_key_t=keys,
        output_key_tp1=keys,
        generator=0,
    )
    row = torch.arange(6.0).view(6, 1)
    ends = (torch.arange(6) % 3 == 2).view(6, 1)
    buffer.extend(
        {"observation": row, "privileged": row * 10, "done": ends}, final={"observation": row + 0.5}
    )
    batch = buffer.sample(600)
    reached = set(batch["observation"].flatten().int().tolist())
    assert reached == ({0, 1, 3, 4} if at_end == "exclude" else set(range(6)))
    if at_end == "mark":
        assert set(batch["observation"][~batch["next_valid"]].tolist()) == {2.0, 5.0}


@pytest.mark.parametrize("kind", ["final", "mark"])
def test_windows_by_trajectory_reach_ends_that_are_known_or_marked(kind: str) -> None:
    buffer = TrajectoryDictBufferMultiDim(
        capacity=40,
        start_mode="trajectory",
        at_end="mark" if kind == "mark" else "exclude",
        generator=0,
    )
    lengths, row = (3, 5, 4, 2), torch.arange(17.0).view(17, 1)  # and three rows in progress
    ends = torch.isin(torch.arange(17), torch.tensor(lengths).cumsum(0) - 1).view(17, 1)
    buffer.extend(
        {"observation": row, "done": ends}, final={"observation": -row} if kind == "final" else None
    )
    batch = buffer.sample(3 * 30_000, 3)
    first = batch["observation"].view(-1, 3)[:, 0].int()
    # Three trajectories have 1, 3 and 2 windows. The trajectory in progress ends with a row without
    # a next row.
    share = {0: 1 / 3, 3: 1 / 9, 4: 1 / 9, 5: 1 / 9, 8: 1 / 6, 9: 1 / 6}
    counts = torch.bincount(first, minlength=17)
    expected = torch.zeros(17, dtype=torch.float64)
    expected[list(share)] = torch.tensor(list(share.values()), dtype=torch.float64) * 30_000
    assert counts[expected == 0].sum() == 0
    wanted = expected > 0
    # Chi-square at 0.1 %, 5 degrees
    assert float(((counts - expected)[wanted] ** 2 / expected[wanted]).sum()) < 20.5
    at_ends = batch["observation"].view(-1, 3)[:, 2:] == torch.tensor([[2.0, 7.0, 11.0]])
    last_next = batch["next"]["observation"].view(-1, 3)[:, 2]
    sign = -1 if kind == "final" else 1
    assert (
        last_next[at_ends.any(1)] == sign * batch["observation"].view(-1, 3)[at_ends.any(1), 2]
    ).all()
    if kind == "mark":
        assert torch.equal(~batch["next_valid"].view(-1, 3)[:, 2], at_ends.any(1))


def test_a_request_and_options_together_raise() -> None:
    buffer = DictBuffer(capacity=3, end_key="done")
    buffer.extend({"observation": torch.zeros(2, 1), "done": torch.zeros(2, 1)})
    with pytest.raises(
        UsageError, match="request and the options gamma, nonsense exclude each other"
    ):
        buffer.sample_transitions(2, TransitionRequest(), gamma=0.5, nonsense=1)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("at_end", ["exclude", "mark"])
def test_ends_have_final_observations_of_unsigned_integers(dtype: torch.dtype, at_end: str) -> None:
    row = torch.arange(6).view(6, 1)
    record = {"observation": row.to(dtype), "done": row % 3 == 2}
    final = {"observation": (row + 60).to(dtype)}
    buffer = DictBuffer(capacity=8, end_key="done", generator=0)
    windows = TrajectoryDictBufferMultiDim(capacity=8, at_end=at_end, generator=0)
    for item in (buffer, windows):
        item.extend(record, final=final)
    for batch in (buffer.sample_transitions(200, at_end=at_end), windows.sample(200)):
        own, later = batch["observation"].long(), batch["next"]["observation"].long()
        assert batch["next"]["observation"].dtype is dtype and set(own.flatten().tolist()) == set(
            range(6)
        )
        assert torch.equal(later, torch.where(own % 3 == 2, own + 60, own + 1))
    stacked = buffer.sample_transitions(
        50, num_frames=2, next_keys=("observation", ("observation",))
    )
    assert stacked["next"]["observation"].shape == (50, 2, 1)


def test_sample_transitions_needs_an_end_key() -> None:
    buffer = DictBuffer(capacity=3)
    buffer.extend({"observation": torch.zeros(2, 1)})
    with pytest.raises(UsageError, match="end_key"):
        buffer.sample_transitions(1)
    for wrong in ({"num_steps": 0}, {"num_frames": 0}, {"at_end": "drop"}):
        with pytest.raises(UsageError):
            buffer = DictBuffer(capacity=3, end_key="done")
            buffer.extend({"observation": torch.zeros(2, 1), "done": torch.zeros(2, 1)})
            buffer.sample_transitions(1, **wrong)


@pytest.mark.parametrize(
    ("taken", "options"),
    [
        ("discount", {"num_steps": 2}),
        ("next_valid", {"at_end": "mark"}),
        ("next", {}),
        ("next/observation", {}),
    ],
)
def test_reserved_field_names_of_transitions_raise(taken, options):
    first, _, rest = taken.partition("/")
    rows = {
        "observation": torch.arange(6.0).view(6, 1),
        "reward": torch.ones(6, 1),
        "done": torch.arange(6).view(6, 1) == 5,
    }
    rows[first] = {rest: torch.ones(6, 1)} if rest else torch.ones(6, 1)
    buffer = DictBuffer(capacity=6, end_key="done", generator=0)
    buffer.extend(rows)
    with pytest.raises(UsageError, match=f"the field name '{taken}' is reserved"):
        buffer.sample_transitions(4, **options)
    others = {"num_steps": 1, "at_end": "exclude", "next_keys": ()}
    alone = buffer.sample_transitions(4, **others)[first]
    assert torch.equal(alone[rest] if rest else alone, torch.ones(4, 1))


def test_options_of_transitions_may_be_numpy_numbers():
    buffer = TrajectoryDictBufferMultiDim(16, n_dim=2, generator=0)
    steps = torch.arange(8.0).view(8, 1, 1)
    buffer.extend(
        {"observation": steps, "reward": steps, "done": torch.zeros(8, 1, 1, dtype=torch.bool)}
    )
    request = {"num_steps": np.int64(2), "num_frames": np.int32(2), "gamma": np.float64(0.5)}
    drawn = buffer.sample_transitions(np.int64(5), **request)
    assert drawn["discount"].flatten().tolist() == [0.25] * 5
    now = drawn["observation"][:, -1]
    assert torch.equal(drawn["reward"], now + 0.5 * (now + 1))
    assert TransitionRequest(**request) == TransitionRequest(num_steps=2, num_frames=2, gamma=0.5)


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan"), "0.9"])
def test_gamma_of_transitions_is_a_number_between_0_and_1(gamma):
    buffer = DictBuffer(capacity=4, end_key="done", generator=0)
    buffer.extend({"observation": torch.zeros(3, 1), "done": torch.zeros(3, 1)})
    with pytest.raises(UsageError, match=r"gamma must be in \[0, 1\]"):
        buffer.sample_transitions(1, gamma=gamma)
