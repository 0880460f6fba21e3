"""The adapter for rsl_rl: rsl_rl's algorithms run on our storage with the same numbers."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage import RolloutOverflowError, SchemaError, UsageError, load_store

pytest.importorskip("tensordict", exc_type=ImportError)
algorithms = pytest.importorskip("rsl_rl.algorithms", exc_type=ImportError)
models = pytest.importorskip("rsl_rl.models", exc_type=ImportError)
theirs = pytest.importorskip("rsl_rl.storage", exc_type=ImportError)
runners = pytest.importorskip("rsl_rl.runners", exc_type=ImportError)

from tensordict import TensorDict  # noqa: E402

from storage.adapters.rsl_rl import RslRlStorage  # noqa: E402
from tests.orders import everything  # noqa: E402
from tests.orders.everything import global_states  # noqa: E402
from tests.storage.rollouts import columns_of, value_of  # noqa: E402
from tests.test_compiled_learners import assert_one_graph  # noqa: E402

ENVS, STEPS, ACTIONS = 8, 12, 3
GROUPS = {
    "actor": ["policy"],
    "critic": ["policy", "privileged"],
    "student": ["policy"],
    "teacher": ["privileged"],
}
GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}


def observe(generator):
    return TensorDict(
        {
            "policy": torch.randn(ENVS, 5, generator=generator),
            "privileged": torch.randn(ENVS, 7, generator=generator),
        },
        batch_size=[ENVS],
    )


def network(kind, which, out, noisy):
    """A small model of rsl_rl, feed-forward or recurrent."""
    options = {"hidden_dims": [16], "distribution_cfg": dict(GAUSSIAN) if noisy else None}
    example = observe(torch.Generator())
    if kind == "mlp":
        return models.MLPModel(example, GROUPS, which, out, **options)
    return models.RNNModel(example, GROUPS, which, out, **options, rnn_type=kind, rnn_hidden_dim=6)


def learn(storage, kind, build, num_updates=10):
    """Run an algorithm of rsl_rl on a storage. Return the losses of every update."""
    torch.manual_seed(3)
    algorithm = build(kind, storage)
    algorithm.train_mode()
    generator, losses = torch.Generator().manual_seed(4), []
    obs = observe(generator)
    for _ in range(num_updates):
        with torch.inference_mode():
            for _ in range(STEPS):
                actions = algorithm.act(obs)
                obs = observe(generator)
                rewards = -actions.pow(2).sum(-1) + torch.randn(ENVS, generator=generator)
                dones = torch.rand(ENVS, generator=generator) < 0.15
                cut = dones & (torch.rand(ENVS, generator=generator) < 0.5)
                algorithm.process_env_step(obs, rewards, dones, {"time_outs": cut.float()})
            algorithm.compute_returns(obs)
        losses.append(algorithm.update())
    return losses


def ppo(kind, storage):
    return algorithms.PPO(
        network(kind, "actor", ACTIONS, True),
        network(kind, "critic", 1, False),
        storage,
        num_mini_batches=4,
        num_learning_epochs=2,
    )


def distillation(kind, storage):
    student, teacher = (
        network(kind, "student", ACTIONS, False),
        network("mlp", "teacher", ACTIONS, False),
    )
    return algorithms.Distillation(student, teacher, storage, gradient_length=4)


def make(kind, training="rl", **options):
    return kind(training, ENVS, STEPS, observe(torch.Generator()), (ACTIONS,), **options)


@pytest.mark.parametrize("kind", ["mlp", "gru", "lstm"])
@pytest.mark.parametrize("training, build", [("rl", ppo), ("distillation", distillation)])
def test_losses_of_ten_updates_equal_those_on_their_own_storage(kind, training, build):
    expected = learn(make(theirs.RolloutStorage, training), kind, build)
    got = learn(make(RslRlStorage, training, generator=torch.default_generator), kind, build)
    assert len(got) == 10
    for mine, other in zip(got, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in other:
            assert mine[name] == pytest.approx(other[name], abs=1e-5), name


class Walks:
    """The environments of a runner: random observations, some terminations, and a time limit."""

    num_envs = ENVS
    num_actions = ACTIONS
    max_episode_length = 10
    device = "cpu"

    def __init__(self):
        self.cfg = {}
        self.episode_length_buf = torch.zeros(ENVS, dtype=torch.long)
        self.generator = torch.Generator().manual_seed(4)

    def get_observations(self):
        return observe(self.generator)

    def step(self, actions):
        self.episode_length_buf += 1
        is_cut = self.episode_length_buf >= self.max_episode_length
        dones = is_cut | (torch.rand(ENVS, generator=self.generator) < 0.15)
        self.episode_length_buf[dones] = 0
        rewards = -actions.pow(2).sum(-1)
        return self.get_observations(), rewards, dones.long(), {"time_outs": is_cut.float()}


def learned_by_a_runner(is_ours):
    """Run rsl_rl's runner for three iterations, on our storage or on its own.

    Return all parameters.
    """
    model = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu"}
    options = {
        "num_steps_per_env": STEPS,
        "save_interval": 100,
        "obs_groups": {name: GROUPS[name] for name in ("actor", "critic")},
        "actor": {**model, "distribution_cfg": dict(GAUSSIAN)},
        "critic": dict(model),
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 4},
    }
    torch.manual_seed(3)
    runner = runners.OnPolicyRunner(Walks(), options, None, "cpu")
    if is_ours:
        runner.alg.storage = RslRlStorage.like(
            runner.alg.storage, generator=torch.default_generator
        )
    runner.learn(3)
    assert isinstance(runner.alg.storage, RslRlStorage) == is_ours
    models = (runner.alg.actor, runner.alg.critic)
    return torch.cat([x.detach().flatten() for model in models for x in model.parameters()])


def test_a_runner_learns_on_our_storage_what_it_learns_on_its_own():
    assert torch.equal(learned_by_a_runner(True), learned_by_a_runner(False))


@pytest.mark.parametrize("training", ["rl", "distillation"])
def test_a_storage_created_like_theirs_has_the_same_sizes(training):
    example = make(theirs.RolloutStorage, training)
    storage = RslRlStorage.like(example, compat=False)
    assert storage.training_type == training and not storage.compat
    assert storage.observations.batch_size == torch.Size([STEPS, ENVS])
    for name in ("rewards", "actions", "dones"):
        assert getattr(storage, name).shape == getattr(example, name).shape


def test_mini_batches_go_into_a_compiled_learner_as_one_graph():
    storage = filled(generator=0)
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    assert_one_graph(vars(batch) for batch in storage.mini_batch_generator(4, 2))


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_a_runner_learns_without_compat(kind):
    losses = learn(make(RslRlStorage, compat=False), kind, ppo, num_updates=3)
    assert all(torch.isfinite(torch.tensor(value)) for loss in losses for value in loss.values())


def filled(kind=RslRlStorage, **options):
    storage = make(kind, **options)
    for step in range(STEPS):
        transition = storage.Transition()
        observations = {"policy": rows(step, 5), "privileged": rows(step, 7)}
        transition.observations = TensorDict(observations, batch_size=[ENVS])
        transition.actions, transition.rewards = rows(step, ACTIONS), rows(step)
        transition.dones, transition.values = torch.zeros(ENVS), rows(step, 1)
        transition.actions_log_prob = rows(step)
        transition.distribution_params = (rows(step, ACTIONS), rows(step, ACTIONS) + 0.5)
        storage.add_transition(copy.copy(transition))
    return storage


def test_permutations_of_torchs_default_generator_are_those_of_their_own_storage():
    orders = []
    for kind, options in [
        (theirs.RolloutStorage, {}),
        (RslRlStorage, {"generator": torch.default_generator}),
    ]:
        storage = filled(kind, **options)
        storage.returns, storage.advantages = storage.values.clone(), storage.values.clone()
        torch.manual_seed(5)
        updates = [list(storage.mini_batch_generator(5, 2)) for _ in range(2)]
        orders.append([[batch.values.flatten().tolist() for batch in update] for update in updates])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]


@pytest.mark.parametrize("compat", [True, False])
def test_no_global_generator_is_used_without_compat(compat):
    before = global_states()
    torch.manual_seed(31)
    first = filled(compat=compat, generator=None)
    torch.manual_seed(31)
    other = filled(compat=compat, generator=None)
    orders = []
    for storage in (first, other):
        storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
        orders.append(
            [batch.values.flatten().tolist() for batch in storage.mini_batch_generator(4, 2)]
        )
    assert orders[0] != orders[1]
    torch.manual_seed(31)
    assert global_states()[2:] == before[2:]


def rows(step, *shape):
    """Values of step + env / 100."""
    x = step + torch.arange(ENVS) / 100
    return x.reshape(-1, *([1] * len(shape))).expand(ENVS, *shape).clone()


def test_every_field_of_a_row_belongs_together():
    storage = filled()
    with pytest.raises(UsageError, match=r"returns and advantages are older than the last step"):
        storage.mini_batch_generator(4, 2)
    storage.returns, storage.advantages = storage.values + 1, storage.values - 1
    assert storage.observations.batch_size == torch.Size([STEPS, ENVS])
    for batch in storage.mini_batch_generator(4, 2):
        row = batch.values
        assert batch.observations.batch_size == torch.Size(
            [STEPS * ENVS // 4]
        ) and batch.hidden_states == (None, None)
        for x in (batch.actions, batch.observations["policy"], batch.observations["privileged"]):
            assert torch.equal(x, row.expand_as(x))
        mean, deviation = batch.old_distribution_params
        assert torch.equal(mean + 0.5, deviation) and torch.equal(mean[:, :1], row)
        torch.testing.assert_close(batch.returns - 1, batch.advantages + 1)


def test_every_epoch_of_one_update_has_the_same_batches_and_every_row_once():
    storage = filled()
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    batches = [batch.values.flatten() for batch in storage.mini_batch_generator(4, 2)]
    assert all(torch.equal(x, y) for x, y in zip(batches[:4], batches[4:], strict=True))
    assert torch.equal(
        torch.cat(batches[:4]).sort().values, filled().values.flatten().sort().values
    )


def test_add_rollout_records_the_storage(tmp_path):
    with RolloutWriter(tmp_path, ENVS, durable=False) as writer:
        writer.add_rollout(filled(), include=("values",))
    batch = RolloutDataset(tmp_path, ENVS, device="cpu").get_batch(STEPS)
    expected = torch.stack([rows(step) for step in range(STEPS)])
    assert batch.observation.shape == (STEPS, ENVS, 5 + 7)
    for x in (batch.observation, batch.action, batch.reward, batch.extras["values"]):
        assert torch.equal(x, expected.reshape(STEPS, ENVS, *[1] * (x.ndim - 2)).expand_as(x))


@pytest.mark.parametrize("kind", [RslRlStorage, theirs.RolloutStorage])
def test_steps_for_distillation_come_in_order(kind):
    storage = make(RslRlStorage, "distillation")
    transition = kind.Transition()  # theirs takes no arguments: its fields are set
    for step in range(STEPS):
        observations = {"policy": rows(step, 5), "privileged": rows(step, 7)}
        transition.observations = TensorDict(observations, batch_size=[ENVS])
        transition.actions, transition.rewards = rows(step, ACTIONS), rows(step)
        transition.dones = torch.ones(ENVS)
        transition.privileged_actions = rows(step, ACTIONS) + 0.25
        storage.add_transition(transition)
        transition.clear()
    batches = list(storage.generator())
    assert [int(batch.observations["policy"][0, 0]) for batch in batches] == list(range(STEPS))
    assert (
        torch.equal(batches[3].privileged_actions, rows(3, ACTIONS) + 0.25)
        and batches[0].dones.all()
    )


def test_wrong_calls_give_clear_errors():
    storage = filled()
    with pytest.raises(RolloutOverflowError):
        storage.add_transition(storage.Transition())
    with pytest.raises(
        UsageError,
        match=r"generator: training_type is 'rl', expected 'distillation'\.",
    ):
        storage.generator()
    with pytest.raises(UsageError, match="training_type is 'distillation', expected 'rl'"):
        make(RslRlStorage, "distillation").mini_batch_generator(1, 1)
    with pytest.raises(
        UsageError, match="training_type must be one of 'distillation', 'rl', got 'r1'"
    ):
        make(RslRlStorage, "r1")
    with pytest.raises(UsageError, match=r"generator: the storage is empty"):
        make(RslRlStorage, "distillation").generator()
    storage.clear()
    with pytest.raises(SchemaError, match="field 'observations/privileged' is missing"):
        storage.add_transition(
            storage.Transition(observations=TensorDict({"policy": rows(0, 5)}, batch_size=[ENVS]))
        )


@pytest.mark.parametrize("training", ["rl", "distillation"])
def test_the_storage_is_saved_and_loaded_like_any_storage(tmp_path, training):
    storage = filled() if training == "rl" else make(RslRlStorage, training)
    storage.save(tmp_path / "kept")
    loaded = load_store(tmp_path / "kept")
    assert (
        type(loaded) is RslRlStorage
        and loaded.step == storage.step
        and loaded.training_type == training
    )
    kept = columns_of(loaded)
    for name, x in columns_of(storage).items():
        assert torch.equal(x, kept[name]), name


def test_a_failed_first_add_changes_nothing():
    storage = make(RslRlStorage)
    with pytest.raises(SchemaError):
        storage.add_transition(storage.Transition(distribution_params=(rows(0, ACTIONS),)))
    assert storage.step == 0 and not any(x.any() for x in columns_of(storage).values())


def test_mini_batches_without_compat_have_the_stored_order_of_a_rollout_storage():
    num_envs, num_steps = 6, 8
    example = {"policy": value_of(0, 0, num_envs, 3)}
    storage = RslRlStorage(
        "rl", num_envs, num_steps, example, (ACTIONS,), compat=False, generator=15
    )
    for step in range(num_steps):
        transition = RslRlStorage.Transition()
        transition.observations = {"policy": value_of(0, step, num_envs, 3)}
        transition.actions = torch.zeros(num_envs, ACTIONS)
        transition.rewards = torch.zeros(num_envs)
        transition.dones = torch.zeros(num_envs)
        transition.values = torch.zeros(num_envs, 1)
        transition.actions_log_prob = torch.zeros(num_envs, 1)
        transition.distribution_params = (
            torch.zeros(num_envs, ACTIONS),
            torch.ones(num_envs, ACTIONS),
        )
        storage.add_transition(transition)
    storage.compute_returns(torch.zeros(num_envs), 0.9, 0.9)
    rows = [batch.observations["policy"][:, 0] for batch in storage.mini_batch_generator(3, 2)]
    order = (torch.cat(rows) * 100).round().long().tolist()
    stored = json.loads(everything.STORED.read_text())["rollout_mini_batches"]
    assert order[: everything.NUM_SHOWN] == stored["first"]
