"""The arithmetic of cursors compared with a naive simulation, frame by frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.playback.step_planner import (
    PassOrder,
    StreamState,
    assign_next,
    plan_steps,
    share_of,
)


class NaiveStream:
    """Each env plays its trajectory, and then takes the next trajectory of the queue at once."""

    def __init__(self, num_envs, lengths, passes):
        self.lengths = lengths
        self.queue = [item for one_pass in passes for item in one_pass]
        self.envs = [list(self.queue.pop(0)) for _ in range(num_envs)]
        self.is_first = [True] * num_envs
        self.is_exhausted = [False] * num_envs

    def step(self):
        shown = []
        for env, (trajectory, frame) in enumerate(self.envs):
            if self.is_exhausted[env]:
                shown.append((trajectory, self.lengths[trajectory] - 1, False, True, False))
            else:
                is_last = frame == self.lengths[trajectory] - 1
                shown.append((trajectory, frame, self.is_first[env], is_last, True))
        for env, (trajectory, frame) in enumerate(self.envs):
            if self.is_exhausted[env]:
                continue
            self.is_first[env] = False
            self.envs[env][1] += 1
            if frame + 1 == self.lengths[trajectory]:
                if self.queue:
                    self.envs[env] = list(self.queue.pop(0))
                    self.is_first[env] = True
                else:
                    self.is_exhausted[env] = True
                    self.envs[env] = [trajectory, self.lengths[trajectory]]
        return shown

    def look(self):
        return [
            (trajectory, min(frame, self.lengths[trajectory] - 1))
            for trajectory, frame in self.envs
        ]


@st.composite
def streams(draw):
    num_envs = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    num_passes = draw(st.integers(1, 3))
    passes = []
    for _ in range(num_passes):
        order = draw(st.permutations(range(len(lengths))))
        passes.append([(t, draw(st.integers(0, lengths[t] - 1))) for t in order])
    while num_passes * len(lengths) < num_envs:
        num_envs -= 1
    return num_envs, lengths, passes


def pass_orders_of(lengths, passes, source):
    return [
        PassOrder(
            np.array(lengths),
            np.array([t for t, _ in p]),
            np.array([f for _, f in p]),
            number,
            source[number],
        )
        for number, p in enumerate(passes)
    ]


def dense(plan, num_envs):
    """Convert a plan to (trajectory, frame) of every env and step.

    Check that each is covered once.
    """
    actual = np.full((num_envs, plan.num_steps + 1, 2), -1)
    for part in plan.parts:
        for env, time, trajectory, frame, count in zip(*part.pieces, strict=True):
            assert count >= 1 and (actual[env, time : time + count] == -1).all()
            actual[env, time : time + count, 0] = trajectory
            actual[env, time : time + count, 1] = np.arange(frame, frame + count)
    assert (actual >= 0).all()
    return actual


@settings(max_examples=300, deadline=None)
@given(streams(), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans())
def test_any_division_into_calls_equals_single_steps(stream, calls, has_one_source):
    check_against_stepping(*stream, calls, has_one_source)


@pytest.mark.parametrize("has_one_source", [True, False])
@pytest.mark.parametrize("longest", [2, 6, 40])
def test_trajectories_that_end_within_a_call_are_replaced_in_the_order_of_time_and_env(
    longest, has_one_source
):
    chance = np.random.default_rng(longest)
    lengths = chance.integers(1, longest + 1, 500).tolist()
    passes = [
        [(t, int(chance.integers(lengths[t]))) for t in chance.permutation(500).tolist()]
        for _ in range(3)
    ]
    check_against_stepping(70, lengths, passes, [30, 1, 7, 30, 500 * longest // 70], has_one_source)


def check_against_stepping(num_envs, lengths, passes, calls, has_one_source):
    naive = NaiveStream(num_envs, lengths, passes)
    sources = (
        ["one"] * len(passes) if has_one_source else [str(number) for number in range(len(passes))]
    )
    pass_orders = pass_orders_of(lengths, passes, sources)

    def next_pass(pass_order, in_use):
        return (
            (pass_orders[pass_order.number + 1], in_use)
            if pass_order.number + 1 < len(pass_orders)
            else None
        )

    state, pass_order = assign_next(
        StreamState.fresh(num_envs), np.arange(num_envs), pass_orders[0], next_pass
    )
    for num_steps in calls:
        plan, state, pass_order = plan_steps(state, pass_order, num_steps, next_pass)
        frames = dense(plan, num_envs)
        ends = {(e, t) for part in plan.parts for e, t, _ in zip(*part.ends, strict=True)}
        firsts = set(zip(plan.first_env.tolist(), plan.first_time.tolist(), strict=True))
        for time in range(num_steps):
            for env, (trajectory, frame, is_first, is_last, is_valid) in enumerate(naive.step()):
                assert tuple(frames[env, time]) == (trajectory, frame)
                assert ((env, time) in firsts) == is_first
                assert ((env, time) in ends) == is_last
                assert (time < plan.num_valid[env]) == is_valid
        assert [tuple(pair) for pair in frames[:, num_steps]] == naive.look()
        assert state.is_exhausted.tolist() == naive.is_exhausted


@settings(max_examples=100, deadline=None)
@given(streams(), st.data())
def test_advancing_some_envs_does_not_move_the_others(stream, data):
    num_envs, lengths, passes = stream
    pass_orders = pass_orders_of(lengths, passes, ["one"] * len(passes))

    def next_pass(pass_order, in_use):
        return (
            (pass_orders[pass_order.number + 1], in_use)
            if pass_order.number + 1 < len(pass_orders)
            else None
        )

    before, pass_order = assign_next(
        StreamState.fresh(num_envs), np.arange(num_envs), pass_orders[0], next_pass
    )
    envs = np.array(sorted(data.draw(st.sets(st.integers(0, num_envs - 1), min_size=1))))
    others = np.setdiff1d(np.arange(num_envs), envs)
    plan, after, _ = plan_steps(before, pass_order, 3, next_pass, envs)
    assert {int(env) for part in plan.parts for env in part.pieces.env} == set(envs.tolist())
    for name in ("trajectory", "left", "is_first", "is_exhausted"):
        assert (getattr(after, name)[others] == getattr(before, name)[others]).all()


@settings(max_examples=200, deadline=None)
@given(
    streams(), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.booleans()
)
def test_the_plan_of_a_shard_is_its_part_of_the_whole_plan(
    stream, calls, num_shares, has_one_source
):
    num_envs, lengths, passes = stream
    pass_orders = pass_orders_of(
        lengths, passes, ["one" if has_one_source else str(number) for number in range(len(passes))]
    )

    def next_pass(pass_order, in_use):
        return (
            (pass_orders[pass_order.number + 1], in_use)
            if pass_order.number + 1 < len(pass_orders)
            else None
        )

    state, pass_order = assign_next(
        StreamState.fresh(num_envs), np.arange(num_envs), pass_orders[0], next_pass
    )
    for num_steps in calls:
        shares = [
            slice(n * num_envs // num_shares, (n + 1) * num_envs // num_shares)
            for n in range(num_shares)
        ]
        plan, after, pass_order_after = plan_steps(state, pass_order, num_steps, next_pass)
        for share in shares:
            part, its_after, its_pass_order = plan_steps(
                state, pass_order, num_steps, next_pass, share=share
            )
            assert (
                all(np.array_equal(*pair) for pair in zip(its_after, after, strict=True))
                and its_pass_order is pass_order_after
            )
            expected = share_of(plan, np.arange(num_envs)[share])
            assert (part.num_valid == expected.num_valid).all() and part.is_full == (
                plan.num_valid == num_steps
            ).all()
            firsts = [
                set(zip(item.first_env.tolist(), item.first_time.tolist(), strict=True))
                for item in (part, expected)
            ]
            assert firsts[0] == firsts[1] and len(part.parts) == len(plan.parts)
            for mine, whole in zip(part.parts, expected.parts, strict=True):
                assert mine.pass_order is whole.pass_order
                assert all(
                    map(np.array_equal, (*mine.pieces, *mine.ends), (*whole.pieces, *whole.ends))
                )
        state, pass_order = after, pass_order_after


def test_inputs_are_not_changed():
    pass_order = PassOrder(np.array([2, 2, 2]), np.array([0, 1, 2]), np.zeros(3, np.int64))
    state, _ = assign_next(
        StreamState.fresh(2), np.arange(2), pass_order, lambda pass_order, in_use: None
    )
    kept = [
        state.trajectory.copy(),
        state.left.copy(),
        state.is_first.copy(),
        state.is_exhausted.copy(),
    ]
    plan_steps(state, pass_order, 5, lambda pass_order, in_use: None)
    for array, old in zip(
        (state.trajectory, state.left, state.is_first, state.is_exhausted), kept, strict=True
    ):
        assert (array == old).all()


def test_an_env_whose_trajectory_was_deleted_plays_the_next_trajectory():
    old = PassOrder(np.array([2, 9]), np.array([0, 1]), np.zeros(2, np.int64), 0, "old")
    new = PassOrder(np.array([3, 4]), np.array([1, 0]), np.zeros(2, np.int64), 1, "new")

    def next_pass(pass_order, in_use):
        return new, np.full(len(in_use), -1)

    state, pass_order = assign_next(StreamState.fresh(2), np.arange(2), old, next_pass)
    plan, state, pass_order = plan_steps(state, pass_order, 4, next_pass)
    shown = dense(plan, 2)
    assert [part.pass_order.source for part in plan.parts] == ["old", "new"]
    assert shown[0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    assert shown[1].tolist() == [[1, 0], [1, 1], [0, 0], [0, 1], [0, 2]]
    assert state.trajectory.tolist() == [1, 0] and state.frames(pass_order).tolist() == [2, 2]
    assert sorted(zip(plan.first_env.tolist(), plan.first_time.tolist(), strict=True)) == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
    ]
