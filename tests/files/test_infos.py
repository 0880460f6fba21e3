"""Infos of a step, as returned by environments, for every way of recording."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RecordingWrapper, RolloutDataset, RolloutWriter, record_demonstrations
from storage.errors import FieldTypeError, RolloutDataWarning, SchemaError

N = 3
#: Env 0 terminated, env 1 was truncated, env 2 continues.
DONES = np.array([True, True, False])
CUT = np.array([False, True, False])


def observed(step: int) -> np.ndarray:
    return np.stack([np.full(2, 100 * step + env, np.float32) for env in range(N)])


def last_seen(env: int) -> np.ndarray:
    return np.full(2, 1000 + env, np.float32)


def sb3_infos() -> list[dict]:
    infos = [{"TimeLimit.truncated": bool(cut)} for cut in CUT]
    for env in np.flatnonzero(DONES):
        infos[env]["terminal_observation"] = last_seen(env)
    return infos


def gymnasium_infos() -> dict:
    return {
        "TimeLimit.truncated": CUT,
        "final_obs": np.array([last_seen(0), last_seen(1), None], object),
        "_final_obs": DONES,
    }


def batched_infos() -> dict:
    return {
        "time_outs": torch.from_numpy(CUT),
        "final_observation": torch.from_numpy(observed(10) % 100 + 1000),
    }


def objects(*rows) -> np.ndarray:
    """Return an array of objects, one per environment."""
    actual = np.empty(len(rows), object)
    actual[:] = rows
    return actual


def infos_of_objects() -> dict:
    return {
        "time_outs": CUT,
        "final_obs": np.stack([last_seen(env) for env in range(N)]).astype(object),
    }


FORMS = {
    "a list": sb3_infos,
    "a tuple": lambda: tuple(sb3_infos()),
    "an array": lambda: np.array(sb3_infos(), object),
    "gymnasium": gymnasium_infos,
    "tensors": batched_infos,
    "numbers as objects": infos_of_objects,
    "a tuple of rows": lambda: {"time_outs": CUT, "final_obs": (last_seen(0), last_seen(1), None)},
    "no mask": lambda: gymnasium_infos() | {"_final_obs": None},
}


def record(infos=None, step: int = 0) -> dict:
    actual = {
        "obs": observed(step),
        "actions": np.zeros((N, 1), np.float32),
        "rewards": np.zeros(N, np.float32),
    }
    actual["dones"] = DONES
    return actual if infos is None else actual | {"infos": infos}


def as_object(values: dict) -> SimpleNamespace:
    return SimpleNamespace(**values)


def check(folder, num_ends: int = 2) -> None:
    """Check that env 0 terminated, env 1 was cut, and both have their final observation."""
    batch = RolloutDataset(folder, N, device="cpu").get_batch()
    env = (batch.observation[:, 0] % 100).long()
    assert sorted(env.tolist()) == [0, 1, 2]
    assert batch.done.flatten().all(), "the third was cut by close()"
    assert batch.timeout.flatten().tolist() == [bool(number) for number in env.tolist()]
    ended = env < 2
    assert torch.equal(batch.next_observation[ended, 0], 1000.0 + env[ended])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given_as", ["keywords", "mapping", "object", "rollout", "info"])
def test_time_outs_and_final_observations_of_infos_are_recorded(tmp_path, form, given_as):
    values = record(FORMS[form]())
    with warnings.catch_warnings(), RolloutWriter(tmp_path, N, durable=False) as writer:
        warnings.simplefilter("error")
        if given_as == "rollout":
            infos = values.pop("infos")
            writer.add_rollout({name: value[None] for name, value in values.items()}, infos=[infos])
        elif given_as == "mapping":
            writer.add(values)
        elif given_as == "object":
            writer.add(as_object(values))
        elif given_as == "info":
            values["info"] = values.pop("infos")
            writer.add(**values)
        else:
            writer.add(**values)
        assert sorted(writer.schema) == ["action", "observation", "reward"]
    check(tmp_path)


def test_add_rollout_reads_the_final_observations_of_each_step_in_order(tmp_path):
    dones = np.array([[False, False, False], [True, False, False], [False, True, True]])
    infos = [[{"TimeLimit.truncated": False} for _ in range(N)] for _ in range(3)]
    for step, env in zip(*np.nonzero(dones), strict=True):
        infos[step][env] = {
            "terminal_observation": np.full(2, 10 * step + env, np.float32),
            "TimeLimit.truncated": bool(env == 2),
        }
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        observations = np.stack([observed(step) for step in range(3)])
        rewards = np.zeros((3, N), np.float32)
        actions = np.zeros((3, N, 1), np.float32)
        writer.add_rollout(
            obs=observations, actions=actions, rewards=rewards, dones=dones, infos=infos
        )
    stream = RolloutDataset(tmp_path, 1, device="cpu")
    ends = {}
    for batch in stream:
        if batch.is_last.item():
            env = int(batch.observation.flatten()[0]) % 100
            length = int(batch.observation.flatten()[0]) // 100 + 1
            ends.setdefault(env, []).append(
                (length, batch.next_observation.flatten()[0].item(), batch.timeout.item())
            )
    assert (
        ends[0][0] == (2, 10.0, False)
        and ends[1] == [(3, 21.0, False)]
        and ends[2] == [(3, 22.0, True)]
    )


def test_final_observations_of_dict_observations_are_dicts(tmp_path):
    values = record(sb3_infos())
    values["obs"] = {"a": observed(0), "b": observed(0)[:, :1].astype(np.int64)}
    for info in values["infos"]:
        if "terminal_observation" in info:
            seen = info["terminal_observation"]
            info["terminal_observation"] = {"a": seen, "b": seen[:1].astype(np.int64)}
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(**values)
    batch = RolloutDataset(tmp_path, N, device="cpu", flatten_observations=False).get_batch()
    ended = batch.observation["b"].flatten() < 2
    env = batch.observation["b"].flatten()[ended]
    assert torch.equal(batch.next_observation["b"].flatten()[ended], env + 1000)
    assert torch.equal(batch.next_observation["a"][ended][:, 0], env + 1000.0)


@pytest.mark.parametrize("as_list", [True, False])
def test_infos_of_a_single_environment_are_recorded(tmp_path, as_list):
    info = {"TimeLimit.truncated": True, "terminal_observation": np.full(2, 9, np.float32)}
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        row = np.zeros((1, 2), np.float32)
        writer.add(
            obs=row,
            actions=row,
            rewards=np.zeros(1),
            dones=[True],
            infos=[info] if as_list else info,
        )
    batch = RolloutDataset(tmp_path, 1, device="cpu").get_batch()
    assert batch.timeout.item() and batch.next_observation.flatten().tolist() == [9, 9]


def mixed_infos() -> list[dict]:
    """Return infos of environments of different libraries."""
    return [
        {"terminal_observation": last_seen(0), "TimeLimit.truncated": False},
        {"final_obs": last_seen(1), "time_outs": True},
        {"final_obs": None, "TimeLimit.truncated": None},
    ]


@pytest.mark.parametrize("given_as", ["keywords", "rollout"])
def test_environments_may_use_different_names_in_infos(tmp_path, given_as):
    values = record(mixed_infos())
    with warnings.catch_warnings(), RolloutWriter(tmp_path, N, durable=False) as writer:
        warnings.simplefilter("error")
        if given_as == "rollout":
            infos = values.pop("infos")
            writer.add_rollout({name: value[None] for name, value in values.items()}, infos=[infos])
        else:
            writer.add(**values)
    check(tmp_path)


@pytest.mark.parametrize("name", ["TimeLimit.truncated", "time_outs"])
@pytest.mark.parametrize(
    "flag",
    [float("nan"), np.float32("nan"), torch.tensor(float("nan")), "no", "", b"1", 1j, [1, 0], {}],
)
@pytest.mark.parametrize("form", ["a list", "one mapping"])
def test_a_time_out_that_is_not_a_flag_raises(tmp_path, name, flag, form):
    infos = [{name: True}, {name: flag}, {name: None}]
    passed = infos if form == "a list" else {name: [info[name] for info in infos]}
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        with pytest.raises(
            SchemaError,
            match=rf"'{name}' of infos must be a flag or None, got .* for environment 1",
        ):
            writer.add(**record(passed))
        writer.add(**record(sb3_infos()))
    check(tmp_path)


@pytest.mark.parametrize(
    "flags", [np.array([np.nan, 0, 0]), np.array(["a", "", ""]), torch.tensor([torch.nan, 0, 0])]
)
def test_an_array_of_time_outs_that_are_not_flags_raises(tmp_path, flags):
    text = "'time_outs' of infos must be a flag or None, got .* for environment 0"
    with (
        RolloutWriter(tmp_path, N, durable=False) as writer,
        pytest.raises(SchemaError, match=text),
    ):
        writer.add(**record({"time_outs": flags}))


def test_missing_flags_of_environments_are_not_read(tmp_path):
    infos = gymnasium_infos()
    infos["TimeLimit.truncated"] = np.array([0, 1, np.nan])
    infos["_TimeLimit.truncated"] = np.array([True, True, False])
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(**record(infos))
    check(tmp_path)


@pytest.mark.parametrize("form", ["a list", "one mapping"])
def test_two_names_of_a_time_out_must_agree(tmp_path, form):
    infos = [
        {"TimeLimit.truncated": bool(cut), "time_outs": not cut if env == 1 else bool(cut)}
        for env, cut in enumerate(CUT)
    ]
    passed = (
        infos if form == "a list" else {name: [info[name] for info in infos] for name in infos[0]}
    )
    with (
        RolloutWriter(tmp_path, N, durable=False) as writer,
        pytest.raises(
            SchemaError,
            match=r"'time_outs' and 'TimeLimit\.truncated' of infos contradict each other for environment 1",
        ),
    ):
        writer.add(**record(passed))


def test_keyword_arguments_take_precedence_over_infos(tmp_path):
    final = observed(0) % 100 + 1000
    infos = [
        {"TimeLimit.truncated": True, "terminal_observation": np.zeros(2, np.float32)}
        for _ in range(N)
    ]
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(**record(infos), time_outs=CUT, terminal_observation=final)
    check(tmp_path)


def test_a_record_may_have_the_key_time_limit_truncated(tmp_path):
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(
            {
                **record(),
                "TimeLimit.truncated": CUT,
                "terminal_observation": observed(0) % 100 + 1000,
            }
        )
    check(tmp_path)


def test_an_unknown_key_is_named_in_one_warning(tmp_path):
    infos = [
        {"distance": 0.5, "_distance": True, "TimeLimit.truncated": False},
        {"episode": {"r": 1.0}},
        {},
    ]
    with (
        RolloutWriter(tmp_path, N, durable=False) as writer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for step in range(4):
            writer.add(**record(infos, step))
        writer.add(**record([{"later": 1}, {}, {"distance": 2}], 5))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2 and all(warning.category is RolloutDataWarning for warning in caught)
    assert texts[0].startswith("Keys of infos are not recorded: 'distance', 'episode'. Pass")
    assert texts[1].startswith("Keys of infos are not recorded: 'later'.")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("infos", "error", "text"),
    [
        (
            [{}, {}],
            SchemaError,
            "infos must be a mapping, or a list of 3 mappings, .* got list of 2",
        ),
        ("done", SchemaError, "infos must be a mapping"),
        ([{}, 3, {}], SchemaError, "infos must be a mapping"),
        (
            {"time_outs": np.ones(2, bool)},
            SchemaError,
            "'time_outs' of infos has 2 flags, expected 3",
        ),
        (
            {"TimeLimit.truncated": True},
            SchemaError,
            "'TimeLimit.truncated' of infos has . flags, expected 3",
        ),
        (
            {"final_obs": [last_seen(0)]},
            SchemaError,
            "'final_obs' of infos has 1 final observations, expected 3",
        ),
        (
            {"final_obs": np.full((N, 2), "x", object)},
            FieldTypeError,
            "observations of infos must be numbers",
        ),
        (
            {"final_obs": np.full((N, 2), None)},
            FieldTypeError,
            "observations of infos must be numbers",
        ),
        ({"final_obs": "walk"}, FieldTypeError, "observations of infos must be numbers, got str"),
        ({"final_obs": {1, 2}}, FieldTypeError, "observations of infos must be numbers, got set"),
        ({"final_obs": 3.0}, SchemaError, "one row per environment, got a single float"),
        ({"final_obs": np.array(None)}, FieldTypeError, "observations of infos must be numbers"),
        (
            {"final_obs": [last_seen(0) * 1j] * N},
            FieldTypeError,
            "must be real, got torch.complex",
        ),
        (
            {"final_obs": [last_seen(0), np.zeros(3), None]},
            SchemaError,
            r"different shapes: \[2\], \[3\]",
        ),
        (
            [{"terminal_observation": "x"}] * N,
            FieldTypeError,
            "observations of infos must be numbers, got str",
        ),
        (
            gymnasium_infos() | {"_final_obs": DONES[:1]},
            SchemaError,
            "'_final_obs' of infos must be 3 flags",
        ),
        (
            gymnasium_infos() | {"_final_obs": [True] * 4},
            SchemaError,
            "'_final_obs' of infos must be 3 flags",
        ),
        (
            gymnasium_infos() | {"_final_obs": np.array(["a"] * N)},
            SchemaError,
            "'_final_obs' of infos must be 3 flags",
        ),
        (
            gymnasium_infos() | {"_TimeLimit.truncated": [True]},
            SchemaError,
            "'_TimeLimit.truncated' of infos must be 3 flags",
        ),
        (np.array(3), SchemaError, "infos must be a mapping"),
    ],
)
def test_infos_of_a_wrong_length_or_type_raise_and_write_no_file(tmp_path, infos, error, text):
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        with pytest.raises(error, match=text):
            writer.add(**record(infos))
        assert writer.num_frames == 0


def test_a_rollout_needs_the_infos_of_each_step(tmp_path):
    values = {name: np.stack([value] * 3) for name, value in record().items()}
    infos = [[{"terminal_observation": last_seen(env)} for env in range(N)]] * 2
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        with pytest.raises(SchemaError, match="infos have 2 steps, expected 3"):
            writer.add_rollout(values, infos=infos)
        assert writer.num_frames == 0


@pytest.mark.parametrize("last", [np.zeros(2), {"state": np.zeros(2)}, "x", [1.0, 2.0]])
def test_final_observations_of_another_structure_raise(tmp_path, last):
    values = record({"final_obs": objects(last, last, None)})
    values["obs"] = {"state": observed(0), "height": observed(0)}
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        with pytest.raises(
            SchemaError,
            match="observations of infos must be mappings with 'state', 'height', got",
        ):
            writer.add(**values)
        assert writer.num_frames == 0


@pytest.mark.parametrize("last", [0.5, 300])
def test_final_observations_that_do_not_fit_the_observation_dtype_raise(tmp_path, last):
    values = record([{"terminal_observation": np.full(2, last)}] * N)
    values["obs"] = observed(0).astype(np.uint8)
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        with pytest.raises(FieldTypeError, match="values that do not fit uint8"):
            writer.add(**values)
        assert writer.num_frames == 0


@pytest.mark.parametrize("as_rollout", [False, True])
def test_final_observations_may_be_missing_at_some_ends(tmp_path, as_rollout):
    random = np.random.default_rng(0)
    num_steps = 60
    ended = random.random((num_steps, N)) < 0.4
    has_final = ended & (random.random((num_steps, N)) < 0.5)
    infos: list[list[dict]] = [[{} for _ in range(N)] for _ in range(num_steps)]
    for step, env in np.argwhere(has_final).tolist():
        infos[step][env]["terminal_observation"] = np.full(2, 10000 + 100 * step + env, np.float32)
    observations = np.stack([observed(step) for step in range(num_steps)])
    actions = np.zeros((num_steps, N, 1), np.float32)
    with RolloutWriter(tmp_path, N, durable=False, block_bytes=400) as writer:
        if as_rollout:
            writer.add_rollout(obs=observations, actions=actions, dones=ended, infos=infos)
        else:
            for step in range(num_steps):
                writer.add(
                    obs=observations[step],
                    actions=actions[step],
                    dones=ended[step],
                    infos=infos[step],
                )
    actual = np.zeros((num_steps, N), bool)
    for batch in RolloutDataset(tmp_path, 1, device="cpu"):
        step, env = divmod(int(batch.observation[0, 0]), 100)
        if ended[step, env]:
            actual[step, env] = batch.next_observation[0, 0] == 10000 + 100 * step + env
    assert np.array_equal(actual, has_final)


@pytest.mark.parametrize("as_rollout", [False, True])
def test_extras_with_time_outs_are_infos(tmp_path, as_rollout):
    extras = {
        "time_outs": torch.from_numpy(CUT),
        "final_observation": torch.from_numpy(observed(10) % 100 + 1000),
    }
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        if as_rollout:
            writer.add_rollout(
                {name: value[None] for name, value in record().items()}, extras=[extras]
            )
        else:
            writer.add(**record(), extras=extras)
        assert sorted(writer.schema) == ["action", "observation", "reward"]
    check(tmp_path)


def test_other_extras_are_fields(tmp_path):
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(**record(), extras={"contact": np.ones(N, np.float32)})
        assert "extras/contact" in writer.schema


class Sb3Env:
    """An environment like those of stable-baselines3.

    Episodes end after one step, terminated and truncated in turn.
    """

    num_envs = N

    def __init__(self) -> None:
        self.step_number = 0

    def reset(self):
        return observed(0)

    def step(self, actions):
        return observed(0), np.zeros(N, np.float32), DONES.copy(), sb3_infos()


@pytest.mark.parametrize("way", ["wrapper", "demonstrations"])
def test_environments_are_recorded_alike(tmp_path, way):
    env = Sb3Env()
    act = np.zeros((N, 1), np.float32)
    if way == "wrapper":
        wrapped = RecordingWrapper(env, tmp_path, durable=False)
        wrapped.reset()
        wrapped.step(act)
        wrapped.rollout_writer.close()
    else:
        record_demonstrations(
            env, lambda _: act, tmp_path, min_timesteps=3, durable=False, show_progress=False
        )
    check(tmp_path)


@pytest.mark.parametrize("way", ["batched", "listed", "rollout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint16])
def test_final_observations_in_infos_have_the_dtype_of_the_observations(tmp_path, way, dtype):
    seen = torch.arange(2 * N, dtype=torch.float32).reshape(N, 2)
    now, last = seen.to(dtype), (seen + 10).to(dtype)
    values = {"observation": now, "action": np.zeros((N, 1), np.float32), "done": DONES}
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        if way == "rollout":
            values = {name: value[None] for name, value in values.items()}
            writer.add_rollout(**values, infos=[{"final_obs": last}])
        elif way == "listed":
            writer.add(**values, infos=[{"terminal_observation": row} for row in last])
        else:
            writer.add(**values, infos={"final_obs": last})
        assert writer.schema["observation"].dtype == str(dtype).removeprefix("torch.")
    finals = [episode.final_observation for episode in rollout_data.open(tmp_path)]
    ended = np.flatnonzero(DONES)
    assert [row.tolist() for row in finals[: len(ended)]] == (seen + 10)[ended].tolist()


def test_final_observations_of_other_dtypes_in_a_rollout_raise(tmp_path):
    """Large integers with float32 values are not rounded without an error."""
    now = np.zeros((2, N, 2), np.float32)
    infos = [{"final_obs": now[0]}, {"final_obs": np.full((N, 2), 2**24 + 1)}]
    done = np.ones((2, N), bool)
    with (
        RolloutWriter(tmp_path, N, durable=False) as writer,
        pytest.raises(FieldTypeError, match="float64"),
    ):
        writer.add_rollout(observation=now, action=now, done=done, infos=infos)
