"""`RolloutStorage`: feed-forward mini-batches."""

from __future__ import annotations

import pytest
import torch

from storage import (
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    UsageError,
)
from tests.storage.rollouts import (
    ACTIONS,
    OBS,
    assert_same,
    broken,
    everything,
    fill,
    make_storage,
    make_transition,
)


def rows_of(batch):
    """Return (step, env) of each row, after a check that all fields of a row belong together."""
    step_and_env = batch.obs[:, 0]
    for number, x in (
        (1, batch.critic_obs),
        (2, batch.actions),
        (4, batch.values),
        (5, batch.old_actions_log_prob),
    ):
        torch.testing.assert_close(x[:, 0], 1000.0 * number + step_and_env, atol=1e-3, rtol=0)
    torch.testing.assert_close(
        batch.old_mu[:, -1] + 1000, batch.old_sigma[:, -1], atol=1e-3, rtol=0
    )
    return [round(float(x) * 100) for x in step_and_env]


@pytest.mark.each_value
@pytest.mark.parametrize("reshuffle", ["epoch", "once"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_mini_batches", [1, 2, 5, 7, 24])
def test_each_epoch_visits_every_row_once(num_mini_batches, drop_last, reshuffle):
    storage = fill(make_storage())
    storage.compute_returns(torch.zeros(4), 0.9, 0.9)
    generator = storage.mini_batch_generator(
        num_mini_batches, 3, drop_last=drop_last, reshuffle=reshuffle
    )
    batches = [rows_of(batch) for batch in generator]
    assert len(batches) == 3 * num_mini_batches
    sizes = {len(batch) for batch in batches}
    assert sizes == {24 // num_mini_batches} if drop_last else max(sizes) - min(sizes) <= 1
    everyone = sorted(step * 100 + env for step in range(6) for env in range(4))
    for epoch in range(3):
        seen = sorted(
            row
            for batch in batches[epoch * num_mini_batches : (epoch + 1) * num_mini_batches]
            for row in batch
        )
        assert set(seen) <= set(everyone) and len(set(seen)) == len(seen)
        assert len(seen) == (24 // num_mini_batches * num_mini_batches if drop_last else 24)


@pytest.mark.parametrize("num_epochs", [1, 2, 3])
def test_fewer_epochs_equal_the_first_epochs_of_many(num_epochs):
    """Wide and narrow rows are gathered together or separately. The result must be the same."""
    storages = [RolloutStorage(3, 4, (40,), (300,), (ACTIONS,), generator=7) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        seen = {
            "observations": torch.randn(3, 40, generator=generator),
            "critic_observations": torch.randn(3, 300, generator=generator),
        }
        for storage in storages:
            storage.add_transitions(make_transition(step, 3, **seen))
    for storage in storages:
        storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    few, many = (
        list(storage.mini_batch_generator(2, n))
        for storage, n in zip(storages, (num_epochs, 5), strict=True)
    )
    assert len(few) == 2 * num_epochs and len(many) == 10
    for some, same in zip(few, many[: len(few)], strict=True):
        for name in (
            "obs",
            "critic_obs",
            "actions",
            "values",
            "advantages",
            "returns",
            "old_sigma",
        ):
            assert torch.equal(getattr(some, name), getattr(same, name)), name


def test_i10_every_epoch_has_its_own_permutation_and_leaves_others_out():
    storage = fill(make_storage(5, 5))
    storage.compute_returns(torch.zeros(5), 0.9, 0.9)
    epochs = [[], [], [], []]
    for i, batch in enumerate(storage.mini_batch_generator(3, 4)):
        epochs[i // 3] += rows_of(batch)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len({frozenset(epoch) for epoch in epochs}) > 1


def test_the_permutation_comes_from_the_storages_own_generator():
    def order(storage):
        fill(storage).compute_returns(torch.zeros(4), 0.9, 0.9)
        return [rows_of(batch) for batch in storage.mini_batch_generator(3, 2)]

    state = torch.get_rng_state()
    assert order(make_storage(generator=3)) == order(
        make_storage(generator=torch.Generator().manual_seed(3))
    )
    assert torch.equal(state, torch.get_rng_state())
    assert order(make_storage(generator=3)) != order(make_storage(generator=4))
    orders = []
    # The first one makes 0 a new value, whatever was seeded before this test.
    for seed in (
        1,
        0,
        1,
        0,
    ):
        torch.manual_seed(seed)
        orders.append(order(make_storage(generator=None)))
    assert orders[1] == orders[3]
    assert orders[1] != orders[2]


def test_batches_share_no_memory_with_the_storage_or_each_other():
    storage = fill(make_storage(num_envs=64, num_steps=64))
    storage.compute_returns(torch.zeros(64), 0.9, 0.9)
    before = everything(storage)
    kept = []
    for batch in storage.mini_batch_generator(4, 3):
        for other, copy in kept:
            assert torch.equal(other.obs, copy)
        kept.append((batch, batch.obs.clone()))
        batch.advantages.fill_(-5)
        batch.actions.zero_()
    after = everything(storage)
    before.pop("rng"), after.pop("rng")
    assert_same(before, after)


def test_mini_batches_of_one_permutation_are_views():
    storage = fill(make_storage())
    storage.compute_returns(torch.zeros(4), 0.9, 0.9)
    batches = list(storage.mini_batch_generator(2, 2, reshuffle="once"))
    for first, again in zip(batches[:2], batches[2:], strict=True):
        assert torch.equal(first.obs, again.obs)
        assert first.obs.data_ptr() == again.obs.data_ptr()


def test_wide_and_narrow_fields_of_every_dtype_are_returned_exactly():
    shape = {
        "image": ((8, 8, 3), "uint8"),
        "big": (400,),
        "odd": ((3,), "uint8"),
        "half": ((5,), torch.float16),
        "id": ((), "int64"),
    }
    storage = RolloutStorage(3, 4, shape, {"flag": ((2,), "bool")}, (2,), generator=1)
    for step in range(4):
        row = (torch.arange(3) + 10 * step).reshape(3, 1)
        observations = {
            "image": row.reshape(3, 1, 1, 1).expand(3, 8, 8, 3).to(torch.uint8),
            "big": row.expand(3, 400).float(),
            "odd": row.expand(3, 3).to(torch.uint8),
            "half": row.expand(3, 5).half(),
            "id": row.squeeze(-1),
        }
        transition = make_transition(
            step, 3, critic_observations={"flag": (row % 2 == 1).expand(3, 2)}
        )
        storage.add_transitions(broken(transition, "observations", observations))
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    assert storage.observations["image"].dtype == torch.uint8 and storage.observations[
        "image"
    ].shape == (4, 3, 8, 8, 3)
    for reshuffle in ("epoch", "once"):
        for batch in storage.mini_batch_generator(2, 2, reshuffle=reshuffle):
            ids = batch.obs["id"]
            assert (
                batch.obs["image"].shape == (6, 8, 8, 3)
                and batch.obs["half"].dtype == torch.float16
            )
            for name in ("image", "big", "odd", "half"):
                rows = batch.obs[name].flatten(1)
                assert (rows == ids.unsqueeze(-1).to(rows.dtype)).all(), name
            assert torch.equal(batch.critic_obs["flag"][:, 1], ids % 2 == 1)


def test_a_dict_observation_with_a_missing_or_extra_key_is_refused():
    storage = RolloutStorage(2, 2, {"a": (1,), "b": {"c": (1,)}}, None, (ACTIONS,))
    x = torch.zeros(2, 1)
    transition = make_transition(0, 2, critic_observations=None)
    for wrong in ({"a": x}, {"a": x, "b": {"c": x, "d": x}}, {"a": x, "b": x}, x):
        with pytest.raises(SchemaError):
            storage.add_transitions(broken(transition, "observations", wrong))
    storage.add_transitions(broken(transition, "observations", {"b": {"c": x + 1}, "a": x}))
    assert storage.observations["b"]["c"][0].eq(1).all()


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0, 1), "num_mini_batches must be >= 1, got 0."),
        (
            (25, 1),
            "num_mini_batches must be at most 24, one row each, got 25.",
        ),
        ((2, 0), "num_epochs must be >= 1, got 0."),
        ((2.0, 1), "num_mini_batches must be an integer >= 1, got 2.0."),
    ],
)
def test_wrong_numbers_are_refused_at_the_call(arguments, text):
    storage = fill(make_storage())
    before = everything(storage)
    with pytest.raises(UsageError) as caught:
        storage.mini_batch_generator(*arguments)
    call = "RolloutStorage.mini_batch_generator"
    assert str(caught.value) == f"{call}: {text}"
    with pytest.raises(UsageError, match="reshuffle must be one of"):
        storage.mini_batch_generator(1, 1, reshuffle="never")
    assert_same(before, everything(storage))


def test_batches_are_delivered_on_the_output_device():
    storage = fill(make_storage(output_device="meta"))
    storage.compute_returns(torch.zeros(4), 0.9, 0.9)
    for reshuffle in ("epoch", "once"):
        for batch in storage.mini_batch_generator(2, 1, reshuffle=reshuffle):
            assert batch.obs.is_meta and batch.returns.is_meta and batch.obs.shape == (12, OBS)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.obs.is_meta and batch.masks.is_meta and batch.actions.shape == (6, 4, ACTIONS)
    assert not storage.observations.is_meta


@pytest.mark.parametrize("dtype", ["uint8", "float16", "int64"])
def test_a_field_of_width_0_is_returned_like_any_other(dtype):
    storage = RolloutStorage(
        3, 2, {"none": ((2, 0), dtype), "x": (3,)}, ((0,), dtype), (ACTIONS,), generator=0
    )
    for step in range(2):
        none = torch.zeros(3, 2, 0, dtype=getattr(torch, dtype))
        observations = {"none": none, "x": torch.full((3, 3), float(step))}
        transition = make_transition(step, 3, critic_observations=none[:, 0])
        storage.add_transitions(broken(transition, "observations", observations))
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    for reshuffle in ("epoch", "once"):
        for batch in storage.mini_batch_generator(2, 3, reshuffle=reshuffle):
            assert batch.obs["none"].shape == (3, 2, 0) and batch.obs["none"].dtype == getattr(
                torch, dtype
            )
            assert batch.critic_obs.shape == (3, 0) and batch.obs["x"].shape == (3, 3)


WIDE, NARROW = 300, 3


def one_more(storage, step, **more):
    """Add a step with observations of the storage's width and with the fields of any class."""
    x = torch.full((3, *storage.observations.shape[2:]), float(step))
    transition = make_transition(
        step, 3, critic_observations=None, observations=x, next_observations=x + 1
    )
    storage.add_transitions(transition)


def half_way(cls, width, num_steps, **options):
    """Draw the first of four mini-batches. Return the storage and the remaining mini-batches."""
    storage = cls(3, 4, (width,), None, (ACTIONS,), generator=0, **options)
    for step in range(num_steps):
        one_more(storage, step)
    storage.compute_returns(torch.zeros(3), 0.9, 0.9, allow_partial=True)
    batches = storage.mini_batch_generator(2, 2)
    next(batches)
    return storage, batches


def clear_and_add(storage):
    storage.clear()
    one_more(storage, 9)


CHANGES = {
    "one step more": (RolloutStorage, 3, {}, lambda s: one_more(s, 9)),
    "cleared and added to": (RolloutStorage, 4, {}, clear_and_add),
    "cleared and added to, with next": (SarsaRolloutStorage, 4, {}, clear_and_add),
    "loaded": (RolloutStorage, 4, {}, lambda s: s.load_state_dict(s.state_dict())),
    "assigned": (RolloutStorage, 4, {}, lambda s: setattr(s, "observations", s.observations + 1)),
    "grown": (QueueRolloutStorage, 4, {"buffer_dilation_ratio": 2}, lambda s: s.clear()),
    "overwritten": (QueueRolloutStorage, 6, {}, lambda s: one_more(s, 9)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_generator_raises_if_the_rollout_changes_before_its_batches_are_drawn(name):
    cls, num_steps, options, change = CHANGES[name]
    storage, batches = half_way(cls, WIDE, num_steps, **options)
    change(storage)
    with pytest.raises(UsageError) as caught:
        next(batches)
    assert str(caught.value) == (
        f"{cls.__name__}: the rollout was changed after the first mini-batch was drawn. Draw all "
        "mini-batches before "
        "you add steps."
    )
    kept, batches = half_way(cls, WIDE, num_steps, **options)
    assert len(list(batches)) == 3
    change(kept)  # when all is drawn, nothing is to be said


@pytest.mark.parametrize("reshuffle", ["epoch", "once"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_copied_mini_batches_do_not_depend_on_later_steps(width, reshuffle):
    if width == WIDE and reshuffle == "epoch":
        return
    storages = [RolloutStorage(3, 4, (width,), None, (ACTIONS,), generator=0) for _ in range(2)]
    drawn = []
    for storage in storages:
        for step in range(4):
            one_more(storage, step)
        storage.compute_returns(torch.zeros(3), 0.9, 0.9)
        batches = storage.mini_batch_generator(2, 3, reshuffle=reshuffle)
        drawn.append([next(batches).obs])
        if storage is storages[0]:
            clear_and_add(storage)
        drawn[-1] += [batch.obs for batch in batches]
    assert len(drawn[0]) == 6 and all(torch.equal(x, y) for x, y in zip(*drawn, strict=True))


@pytest.mark.parametrize("cls", [RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("how", ["epoch", "once", "recurrent"])
def test_generators_begun_in_inference_mode_go_on_outside_of_it(cls, width, how):
    storage = cls(3, 4, (width,), None, (ACTIONS,), generator=0)
    for step in range(4):
        x = torch.full((3, width), float(step))
        dones, states = torch.tensor([step == 1, False, True]), torch.full((1, 3, 2), float(step))
        more = {"observations": x, "next_observations": x + 1, "hidden_states": states}
        storage.add_transitions(
            make_transition(step, 3, 1, dones, critic_observations=None, **more)
        )
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    is_recurrent = how == "recurrent"
    with torch.inference_mode():
        calls = storage.recurrent_mini_batch_generator, storage.mini_batch_generator
        batches = calls[0](3, 2) if is_recurrent else calls[1](2, 2, reshuffle=how)
        next(batches)
    for batch in batches:
        tensors = [x for x in batch if isinstance(x, torch.Tensor)]
        tensors += [batch.hidden_states] if is_recurrent else []
        assert len(tensors) >= 8
        for x in tensors:
            if x.is_floating_point():
                weight = torch.nn.Parameter(torch.ones(x.shape[-1]))
                (x * weight).sum().backward()
                assert weight.grad is not None
            x[:1] = 1
