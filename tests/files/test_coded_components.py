"""Coded components are recorded, checked, packed, repaired and streamed like other components."""

from __future__ import annotations

import json
import math
import pickle
import warnings

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rollout_data import RolloutDataset, RolloutWriter, record_demonstrations
from rollout_data.blocks.block_header import DATA, open_block
from rollout_data.tools.cli.command_line import main
from storage.errors import FieldTypeError, SchemaError
from tests.files import coded
from tests.files.readback import blocks_of, field_values, trajectories_of


@pytest.mark.each_value
@pytest.mark.parametrize("cache", ["none", "ram", "device"])
@pytest.mark.parametrize("num_steps", [None, 1, 3, 7, 20])
def test_batches_of_coded_components_equal_those_of_the_raw_recording(folders, cache, num_steps):
    errors = coded.max_errors(folders[0])
    options = {"device": "cpu", "flatten_observations": False, "dataset_loops": 2, "seed": 3}
    options |= {"random_shuffle_traj_order": True, "starting_frame_range": (0, 5)}
    ours = RolloutDataset(folders[0], 2, cache=cache, **options)
    theirs = RolloutDataset(folders[1], 2, **options)
    for _ in range(4 if num_steps else 12):
        coded.check_equal(ours.get_batch(num_steps), theirs.get_batch(num_steps), errors)


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_flat_observations_join_coded_components(folders, cache):
    batch, raw = (
        RolloutDataset(path, 2, device="cpu", cache=cache).get_batch(6) for path in folders
    )
    assert (
        batch.observation.shape == raw.observation.shape
        and batch.observation.dtype == raw.observation.dtype
    )
    assert (batch.observation - raw.observation).abs().max() < 0.003
    assert (batch.next_observation - raw.next_observation).abs().max() < 0.003


def test_every_trajectory_is_read_back_with_its_final_observation(folders):
    ours, theirs = (trajectories_of(path) for path in folders)
    assert [(trajectory.env, trajectory.length, trajectory.flags) for trajectory in ours] == [
        (trajectory.env, trajectory.length, trajectory.flags) for trajectory in theirs
    ]
    for item, raw in zip(ours, theirs, strict=True):
        assert (item.finals is None) == (raw.finals is None)
        for name in coded.COMPONENTS:
            field = f"observation/{name}"
            pairs = [(item.column(field), raw.column(field))]
            pairs += [(item.finals[field], raw.finals[field])] if item.finals else []
            for got, expected in pairs:
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(
                    got, expected, rtol=0, atol=0.003 if name in coded.LOSSY else 0
                )


def test_a_loader_worker_and_a_prefetching_thread_read_chunks(folders):
    plain = RolloutDataset(
        folders[0], 2, device="cpu", flatten_observations=False, num_transitions_per_env=5
    )
    expected = [coded.leaves(next(iter(plain))), *(coded.leaves(next(plain)) for _ in range(3))]
    again = RolloutDataset(
        folders[0], 2, device="cpu", flatten_observations=False, num_transitions_per_env=5
    )
    loader = iter(DataLoader(again, batch_size=None, num_workers=1))
    ahead = iter(
        RolloutDataset(
            folders[0], 2, device="cpu", flatten_observations=False, num_transitions_per_env=5
        ).prefetch()
    )
    for batch in expected:
        for other in (coded.leaves(next(loader)), coded.leaves(next(ahead))):
            assert all(torch.equal(other[name], tensor) for name, tensor in batch.items())


def test_a_block_holds_chunks_offsets_and_how_they_are_coded(folders):
    for path in sorted(folders[0].glob("*.h5")):
        header = open_block(path, verify=True)
        with h5py.File(path) as file:
            codings = json.loads(file.attrs["codecs"])
            for name, (shape, dtype, codec) in coded.COMPONENTS.items():
                if codec == "raw":
                    assert (
                        name in file["data/frames"].dtype.names
                        or f"observation/{name}" in file["data/frames"].dtype.names
                    )
                    continue
                group = file[f"data/observation/{name}"]
                about = dict(group.attrs)
                assert (
                    about["codec"]
                    == codings[f"observation/{name}"]["codec"]
                    == (codec if codec != "auto" else about["codec"])
                )
                assert about["dtype"] == dtype and about["frame_shape"].tolist() == list(shape)
                assert (about["max_error"] > 0) == (name in coded.LOSSY)
                offsets = group["offsets"][()]
                assert group["chunks"].dtype == "u1" and group["chunks"].chunks is None
                assert offsets[0].tolist() == [0, 0] and offsets[-1, 1] == len(group["chunks"])
                sizes = np.diff(offsets, axis=0)
                assert sizes[sizes[:, 1] > 0, 0].max() <= about["frames_per_chunk"] == 8
                for fragment in header.fragments[header.fragments["length"] > 0]:
                    assert {fragment["row"], fragment["row"] + fragment["length"]} <= set(
                        offsets[:, 0].tolist()
                    )


def test_chunks_of_compressible_values_are_smaller_than_their_rows(folders):
    ours, theirs = (
        {n: int(t.places[-1] - t.places[0]) for n, t in blocks_of(path)[0].chunks[DATA].items()}
        for path in folders
    )
    assert theirs == {}
    header = blocks_of(folders[0])[0]
    for name, size in ours.items():
        # Noise in doubles does not compress.
        limit = 1.02 if name.endswith("lidar") else 0.9
        assert size < limit * header.num_frames * header.schema[name].row_bytes, name


def test_the_largest_error_is_measured_over_the_block(tmp_path):
    mapping = {
        "a": "normalized_image",
        "b": "normalized_image+lz4",
        "c": "uint16(0,1)+lz4",
        "d": "lz4",
    }
    with RolloutWriter(tmp_path, 1, obs_disassemble_mapping=mapping, durable=False) as writer:
        for value in (0.25, 1.5, 0.5):
            item = np.full((1, 3), value, np.float32)
            writer.add(
                observation=dict.fromkeys("abcd", item),
                action=np.zeros((1, 1)),
                reward=np.zeros(1),
                done=[False],
            )
    (header,) = blocks_of(tmp_path)
    errors = {name.rpartition("/")[2]: coding.max_error for name, coding in header.codings.items()}
    assert errors == {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0}


def test_auto_chooses_a_codec_in_the_first_block_and_keeps_it(tmp_path):
    rng = np.random.default_rng(0)
    mapping = {"noise": "auto", "smooth": "auto"}
    for name in ("first", "second"):
        with RolloutWriter(
            tmp_path, 2, obs_disassemble_mapping=mapping, durable=False, writer_name=name
        ) as writer:
            for t in range(40):
                noise = rng.integers(0, 256, (2, 30, 30), np.uint8)
                # The choice of the first block applies, although the second block has other data.
                smooth = (
                    np.full((2, 30, 30), t, np.uint8)
                    if t < 20
                    else rng.integers(0, 256, (2, 30, 30), np.uint8)
                )
                writer.add(
                    observation={"noise": noise, "smooth": smooth},
                    action=noise[:, 0],
                    reward=np.zeros(2),
                )
                if t == 19:
                    writer.flush()
    assert (
        json.loads((tmp_path / "metadata.json").read_text())["obs_disassemble_mapping"] == mapping
    )
    headers = blocks_of(tmp_path)
    assert len(headers) == 4
    for header in headers:
        assert header.codings["observation/noise"].codec == "raw"
        assert header.codings["observation/smooth"].codec in ("lz4", "delta+lz4")


def test_pack_copies_chunks_and_joins_blocks_that_auto_coded_differently(tmp_path):
    data, packed = coded.record(tmp_path / "data"), tmp_path / "packed"
    rng = np.random.default_rng(0)
    with RolloutWriter(
        data, 3, obs_disassemble_mapping=coded.CODECS, durable=False, writer_name="y"
    ) as writer:
        steps = {name: coded.values(name, 5, 3) for name in coded.COMPONENTS}
        for _ in range(10):
            steps["segments"] = rng.integers(-(2**31), 2**31, (3, 7, 7), np.int32)
            writer.add(
                observation=steps,
                action=np.zeros((3, 2), np.float32),
                reward=np.zeros(3, np.float32),
            )
    chosen = {header.codings["observation/segments"].codec for header in blocks_of(data)}
    assert len(chosen) == 2 and "raw" in chosen
    assert main(["pack", str(data), str(packed)]) == 0
    before, after = (
        sorted(trajectories_of(path), key=lambda item: (item.end_time_ns, item.env))
        for path in (data, packed)
    )
    assert len(before) == len(after) == 9
    for item, other in zip(before, after, strict=True):
        assert (item.env, item.length, item.flags) == (other.env, other.length, other.flags)
        assert all(
            np.array_equal(item.column(name), other.column(name), equal_nan=True)
            for name in item.fields
        )
        for name, final in (item.finals or {}).items():
            assert np.array_equal(final, other.finals[name], equal_nan=True)
    assert coded.max_errors(packed) == coded.max_errors(data), "nothing was quantized twice"


@pytest.mark.each_value
@pytest.mark.parametrize("with_final", ["a", "b"])
@pytest.mark.parametrize(
    "kinds", [("whole", "coarse"), ("coarse", "whole"), ("whole", "noise"), ("noise", "whole")]
)
def test_pack_keeps_final_observations_that_only_one_of_two_codings_has(
    tmp_path, kinds, with_final
):
    rng = np.random.default_rng(0)
    values = {
        "whole": rng.integers(0, 4, (9, 4096)).astype(np.uint32).view(np.float32),
        "coarse": (np.round(rng.random((9, 4096)) * 4) / 3).astype(np.float32),
        "noise": rng.integers(0, 2**32, (9, 4096), np.uint32).view(np.float32),
    }
    for name, kind in zip("ab", kinds, strict=True):
        mapping = {"c": "auto"}
        with RolloutWriter(
            tmp_path, 1, obs_disassemble_mapping=mapping, durable=False, writer_name=name
        ) as writer:
            for t in range(8 if name == with_final else 40):
                final = {"final_observation": {"c": values[kind][8:]}} if name == with_final else {}
                step = {"c": values[kind][t % 8][None]}
                done = np.array([t == (7 if final else 39)])
                writer.add(
                    observation=step,
                    action=np.zeros((1, 1)),
                    reward=np.zeros(1),
                    done=done,
                    **final,
                )
    codecs = {header.codings["observation/c"].codec for header in blocks_of(tmp_path)}
    assert len(codecs) == 2
    (final,) = [
        trajectory.finals["observation/c"]
        for trajectory in trajectories_of(tmp_path)
        if trajectory.finals
    ]
    assert main(["pack", "--in-place", str(tmp_path)]) == 0
    assert [header.codings["observation/c"].codec in codecs for header in blocks_of(tmp_path)] == [
        True
    ]
    (packed,) = [
        trajectory.finals["observation/c"]
        for trajectory in trajectories_of(tmp_path)
        if trajectory.finals
    ]
    assert packed.tobytes() == final.tobytes()
    columns = [trajectory.column("observation/c") for trajectory in trajectories_of(tmp_path)]
    for name, kind in zip("ab", kinds, strict=True):
        expected = values[kind][np.arange(8 if name == with_final else 40) % 8].tobytes()
        assert expected in [column.tobytes() for column in columns]


def test_a_chunk_is_decoded_once_for_neighbouring_batches(folder, folders):
    """Later changes of the file have no effect."""
    errors = coded.max_errors(folder)
    ours, theirs = (
        RolloutDataset(path, 2, device="cpu", flatten_observations=False)
        for path in (folder, folders[1])
    )
    coded.check_equal(ours.get_batch(1), theirs.get_batch(1), errors)
    for header in blocks_of(folder):
        with open(header.path, "r+b") as file:
            for table in header.chunks[DATA].values():
                file.seek(table.places[0])
                file.write(b"\xff" * int(table.places[-1] - table.places[0]))
    for _ in range(6):
        coded.check_equal(ours.get_batch(1), theirs.get_batch(1), errors)


def test_blocks_that_cannot_be_mapped_are_read(folders, without_maps):
    errors = coded.max_errors(folders[0])
    ours, theirs = (
        RolloutDataset(path, 2, device="cpu", flatten_observations=False) for path in folders
    )
    for _ in range(3):
        coded.check_equal(ours.get_batch(9), theirs.get_batch(9), errors)


def test_blocks_that_are_removed_stay_readable_and_the_index_cache_knows_chunks(folder, folders):
    assert (folder / ".index.npz").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = (
            RolloutDataset(path, 2, device="cpu", flatten_observations=False)
            for path in (folder, folders[1])
        )
        coded.check_equal(
            ours.get_batch(9), theirs.get_batch(9), errors := coded.max_errors(folder)
        )
    for path in folder.glob("*.h5"):
        path.unlink()
    coded.check_equal(ours.get_batch(9), theirs.get_batch(9), errors)


def test_info_shows_codecs_sizes_and_errors(folders, capsys):
    assert main(["info", str(folders[0])]) == 0
    text = capsys.readouterr().out
    assert "split+lz4" in text and "of its size" in text and "error up to" in text
    assert main(["info", "--json", str(folders[0])]) == 0
    about = json.loads(capsys.readouterr().out)["coded"]
    assert set(about) == {f"observation/{name}" for name in coded.CODECS}
    assert (
        about["observation/rgb"]["codecs"] == ["lz4"] and about["observation/rgb"]["max_error"] == 0
    )
    assert 0 < about["observation/rgb"]["num_bytes"] < about["observation/rgb"]["num_raw_bytes"]
    assert (
        about["observation/segments"]["codecs"] != ["auto"]
        and 0 < about["observation/far"]["max_error"] < 1e-3
    )


def test_info_is_strict_json_where_a_nan_has_no_image_value(tmp_path, capsys):
    options = {
        "obs_disassemble_mapping": {"a": "normalized_image", "b": "normalized_image+lz4"},
        "durable": False,
    }
    with RolloutWriter(tmp_path, 1, metadata={"known": [math.inf]}, **options) as writer:
        for value in (0.25, math.nan):
            item = np.full((1, 3), value, np.float32)
            writer.add(
                observation={"a": item, "b": item}, action=np.zeros((1, 1)), reward=np.zeros(1)
            )
    (recorded,) = trajectories_of(tmp_path)
    assert all(recorded.column(f"observation/{name}")[1].tolist() == [0, 0, 0] for name in "ab")
    assert coded.max_errors(tmp_path) == {"observation/a": math.inf, "observation/b": math.inf}
    assert main(["info", "--json", str(tmp_path)]) == 0
    about = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (
        about["coded"]["observation/a"]["max_error"]
        is about["coded"]["observation/b"]["max_error"]
        is None
    )
    assert main(["info", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("error up to inf") == 2


class Cameras:
    """Two envs whose image and range encode env and step."""

    num_envs = 2

    def __init__(self):
        self.t = 0

    def get_observations(self):
        image = torch.full((2, 8, 8, 3), self.t, dtype=torch.uint8) + torch.arange(
            2, dtype=torch.uint8
        ).view(2, 1, 1, 1)
        return {"image": image, "range": torch.full((2, 16), float(self.t))}

    def reset(self):
        return self.get_observations(), {}

    def step(self, action):
        self.t += 1
        return self.get_observations(), torch.ones(2), torch.tensor([self.t % 10 == 0] * 2), {}


def test_a_recorded_policy_has_coded_components(tmp_path):
    record_demonstrations(
        Cameras(),
        lambda observation: torch.zeros(2, 1),
        tmp_path,
        min_timesteps=60,
        obs_disassemble_mapping={"image": "lz4", "range": "delta+shuffle+lz4"},
        show_progress=False,
    )
    batch = RolloutDataset(tmp_path, 2, device="cpu", flatten_observations=False).get_batch(20)
    assert batch.observation["image"].dtype == torch.uint8
    step = batch.observation["range"][..., 0]
    assert torch.equal(
        batch.observation["image"][..., 0, 0, 0], (step + torch.arange(2)).to(torch.uint8)
    )
    assert torch.equal(batch.observation["range"], step[..., None].expand(-1, -1, 16))


def test_flat_observations_are_cut_into_coded_segments(tmp_path):
    segments = {"a": (4, 4), "b": (3,)}
    with RolloutWriter(
        tmp_path,
        2,
        obs_segments=segments,
        obs_disassemble_mapping={"a": "shuffle+lz4"},
        durable=False,
    ) as writer:
        for t in range(20):
            flat = torch.arange(19).float().expand(2, 19) + t
            writer.add(
                observation=flat,
                action=torch.zeros(2, 1),
                reward=torch.zeros(2),
                done=torch.zeros(2).bool(),
            )
    batch = RolloutDataset(tmp_path, 2, device="cpu").get_batch(10)
    assert torch.equal(
        batch.observation,
        torch.arange(19).float() + torch.arange(10).view(-1, 1, 1).expand(10, 2, 1),
    )


@pytest.mark.parametrize(
    ("codec", "kind", "text"),
    [
        (
            "uint16+lz4",
            FieldTypeError,
            "field 'observation/a' has dtype int64. Codec 'uint16+lz4' needs float16",
        ),
        ("normalized_image+lz4", FieldTypeError, "needs a floating dtype or uint8."),
    ],
)
def test_a_codec_that_does_not_support_the_dtype_raises_before_writing(tmp_path, codec, kind, text):
    writer = RolloutWriter(tmp_path, 1, obs_disassemble_mapping={"a": codec}, durable=False)
    with pytest.raises(kind) as caught:
        writer.add(
            observation={"a": np.zeros((1, 3), np.int64)},
            action=np.zeros((1, 1)),
            reward=np.zeros(1),
        )
    assert text in str(caught.value)
    writer.close()
    assert not list(tmp_path.glob("*.h5"))


def test_a_writer_with_other_codecs_cannot_join_a_folder(folder):
    with pytest.raises(SchemaError, match="coded as"):
        coded.record(folder, num_steps=1, codecs={**coded.CODECS, "rgb": "lz4hc"}, writer_name="z")


def test_ranges_of_a_coded_field_equal_the_whole_field(folders):
    for header in blocks_of(folders[0]):
        rows = header.locations[DATA]["observation/depth"][1]
        whole = field_values(header, DATA, "observation/depth", 0, rows)
        for start, stop in [(0, 1), (5, 17), (rows - 3, rows)]:
            assert np.array_equal(
                field_values(header, DATA, "observation/depth", start, stop), whole[start:stop]
            )


def test_get_batch_by_time_reads_coded_components(folders):
    times = torch.tensor([0.32, 1.17])
    options = {"device": "cpu", "flatten_observations": False, "frame_rate_hz": 10}
    ours, theirs = (RolloutDataset(path, 2, **options) for path in folders)
    for dataset in (ours, theirs):
        dataset.get_batch(2)
    (batch, is_inside), (raw, same) = (
        dataset.get_batch_by_time(times) for dataset in (ours, theirs)
    )
    assert torch.equal(is_inside, same)
    assert torch.equal(batch.observation["rgb"], raw.observation["rgb"])
    assert torch.equal(batch.observation["depth"], raw.observation["depth"])


def test_a_dataset_of_chunks_can_be_sent_to_another_process(folders):
    dataset = RolloutDataset(folders[0], 2, device="cpu", flatten_observations=False)
    first = dataset.get_batch(4).observation["rgb"]
    again = pickle.loads(pickle.dumps(dataset))  # starts from the beginning
    assert torch.equal(again.get_batch(4).observation["rgb"], first)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["none", "device"])
def test_coded_components_are_read_to_a_gpu(folders, cache):
    on_gpu, on_cpu = (
        RolloutDataset(folders[0], 2, device=device, cache=cache if device == "cuda" else "none")
        for device in ("cuda", "cpu")
    )
    for _ in range(4):
        batch, expected = on_gpu.get_batch(6), on_cpu.get_batch(6)
        assert batch.observation.is_cuda and torch.equal(
            batch.observation.cpu(), expected.observation
        )
        assert torch.equal(batch.next_observation.cpu(), expected.next_observation)
