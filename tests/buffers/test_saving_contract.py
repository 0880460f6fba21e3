"""The contract of saving, for every class: round trips, replaced saves, kills, damage, rejected
states.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    AsyncCheckpointSaver,
    DictBuffer,
    SchemaError,
    TrajectoryDictBuffer,
    ZBuffer,
    load_checkpoint,
    load_store,
)
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, RolloutDataError
from tests.killed import kill_one_at, workers
from tests.saved import config_of
from tests.watch import watching

from .crash import NAMES, WORK, check_what_is_left
from .crash import states_of as saved_by_killed
from .every_store import MAKERS, columns_of, in_child, plain
from .saved_cases import CASES, continued, exact, states_of, store_of

every_case = pytest.mark.parametrize("name", CASES)
every_class = pytest.mark.parametrize("name", MAKERS)
every_state = pytest.mark.parametrize(
    ("name", "state"), [(name, state) for name in CASES for state in states_of(name)]
)


#: Classes whose folders have the layout of earlier systems.
OF_EARLIER_SYSTEMS = (DictBuffer, TrajectoryDictBuffer, ZBuffer)


@pytest.fixture(scope="module")
def saver() -> Iterator[AsyncCheckpointSaver]:
    with AsyncCheckpointSaver() as saver:
        yield saver


@every_state
def test_a_loaded_store_equals_the_saved_one_and_continues_like_it(
    tmp_path: Path, saver: AsyncCheckpointSaver, name: str, state: str
) -> None:
    store = store_of(name, state)
    saved = exact(store.state_dict())
    store.save(tmp_path / "saved")
    checkpoint = saver.save_async(store.state_dict(), tmp_path / "state.pt")
    before = torch.get_rng_state()
    loaded = {
        "load_store": load_store(tmp_path / "saved"),
        "load": type(store).load(tmp_path / "saved"),
        "load_state_dict": CASES[name].make(99),
        "save_async": CASES[name].make(99),
    }
    loaded["load_state_dict"].load_state_dict(store.state_dict())
    loaded["save_async"].load_state_dict(load_checkpoint(checkpoint.result()))
    assert torch.equal(before, torch.get_rng_state())
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "state.pt"}
    assert exact(store.state_dict()) == saved
    for way, other in loaded.items():
        assert type(other) is type(store), way
        assert exact(other.state_dict()) == saved, way
    expected = exact(continued(name, store))
    for way, other in loaded.items():
        assert exact(continued(name, other)) == expected, way
        assert exact(other.state_dict()) == exact(store.state_dict()), way


@every_case
def test_later_changes_of_a_store_change_no_state_dict(name: str) -> None:
    store = store_of(name, "overwritten")
    state = store.state_dict()
    before = exact(state)
    continued(name, store)
    assert exact(state) == before != exact(store.state_dict())
    other = CASES[name].make(1)
    other.load_state_dict(state)
    continued(name, other)
    assert exact(state) == before


@every_case
def test_a_save_replaces_the_earlier_save_and_leaves_no_other_file(
    tmp_path: Path, name: str
) -> None:
    store_of(name, "partly filled").save(tmp_path / "saved")
    store = store_of(name, "overwritten")
    store.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert exact(load_store(tmp_path / "saved").state_dict()) == exact(store.state_dict())
    # A crash between the two renames of a save leaves this.
    (tmp_path / "saved").rename(tmp_path / ".saved.previous")
    assert exact(load_store(tmp_path / "saved").state_dict()) == exact(store.state_dict())


def test_stores_of_the_test_of_kills_have_two_states_that_differ() -> None:
    for name in NAMES:
        first, second = (plain(store.state_dict()) for store in saved_by_killed(name))
        assert first != second, name


def test_a_killed_save_leaves_the_last_complete_save_or_a_newer_one(tmp_path: Path) -> None:
    with workers(WORK) as process:
        written = []
        for seed in range(len(NAMES)):
            kill_one_at(process, tmp_path / str(seed), seed, tmp_path / str(seed) / ".begun")
            written.append(check_what_is_left(tmp_path / str(seed), seed))
    assert sum(count > 0 for count in written) > len(NAMES) / 2


@every_class
def test_a_flipped_byte_raises_one_clear_error_or_changes_no_data(
    tmp_path: Path, name: str
) -> None:
    MAKERS[name]().save(tmp_path / "b")
    code = "flip_and_load(Path(sys.argv[1]), lambda path: load(path).state_dict(), 809, True)"
    in_child(code, tmp_path / "b")


@every_class
def test_a_flipped_byte_of_the_rows_is_a_wrong_checksum(tmp_path: Path, name: str) -> None:
    MAKERS[name]().save(tmp_path / "b")
    for path in (tmp_path / "b").glob("*.hdf5"):
        whole = path.read_bytes()
        for place in places_of_rows(path):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(CorruptFileError, match="checksum"):
                load_store(tmp_path / "b")
        path.write_bytes(whole)


def places_of_rows(path: Path) -> list[int]:
    """Return the offset of the first byte of every dataset in a file."""
    places = []

    def append(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.size:
            places.append(node.id.get_offset())

    with h5py.File(path) as file:
        file.visititems(append)
    return places


@every_class
def test_a_truncated_file_raises_one_clear_error_and_changes_no_store(
    tmp_path: Path, name: str
) -> None:
    store = MAKERS[name]()
    store.save(tmp_path / "b")
    before = plain(store.state_dict())
    for path in (tmp_path / "b").iterdir():
        whole = path.read_bytes()
        num_whole = len(whole.rstrip(b"\n"))
        for num_bytes in (0, 1, 100, num_whole // 2, num_whole - 1):
            path.write_bytes(whole[:num_bytes])
            with pytest.raises(DataFileError, match=str(path)):
                type(store).load(tmp_path / "b")
        path.unlink()
        with pytest.raises(DataFileError, match=str(tmp_path / "b")):
            load_store(tmp_path / "b")
        path.write_bytes(whole)
    assert plain(store.state_dict()) == before
    assert plain(load_store(tmp_path / "b").state_dict()) == before


#: Audit events of Python that would occur if code of a file ran.
EVENTS_OF_CODE = {"pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen"}


@every_class
def test_a_load_runs_no_code_and_imports_no_class_of_the_file(tmp_path: Path, name: str) -> None:
    MAKERS[name]().save(tmp_path / "b")
    load_store(tmp_path / "b")  # Modules are imported at their first use.
    seen = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS_OF_CODE or event == "import":
            seen.append((event, arguments[:1]))

    path = tmp_path / "b" / "config.json"
    config = config_of(path)
    key = "class" if "class" in config else "__target__"
    with watching(note):
        load_store(tmp_path / "b")
        for target in ("os.system", "antigravity.fly", "tests.no_such_module.DictBuffers"):
            path.write_text(json.dumps({**config, key: target}))
            with pytest.raises(ForeignFileError, match=target):
                load_store(tmp_path / "b")
    assert seen == []


def refused(store: Any, state: Any, text: str) -> None:
    before = exact(store.state_dict())
    with pytest.raises(SchemaError, match=text):
        store.load_state_dict(state)
    assert exact(store.state_dict()) == before


@every_case
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    store = store_of(name, "partly filled")
    state = store.state_dict()
    other = next(case for case in CASES if type(CASES[case].make(0)) is not type(store))
    for state_of_wrong_type in (None, (), "state", 5):
        refused(store, state_of_wrong_type, "must be a mapping")
    for version in (2, 0, "1", None):
        refused(store, {**state, "version": version}, f"version {version!r}")
    for key in ("class", "arguments", "numbers"):
        refused(store, {part: value for part, value in state.items() if part != key}, f"'{key}'")
    refused(store, store_of(other, "partly filled").state_dict(), type(store).__name__)
    refused(store, {**state, "class": "Unknown"}, "Unknown")
    refused(store, {**state, "arguments": {**state["arguments"], "seed": 1}}, "seed=1")
    for wrong in wrong_tensors(state["tensors"]):
        with pytest.raises((SchemaError, DataFileError)):
            store.load_state_dict({**state, "tensors": wrong})
        assert exact(store.state_dict()) == exact(state)
    store.load_state_dict(state)
    assert exact(store.state_dict()) == exact(state)


def wrong_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Yield tensors of a state without or with another generator, without rows, and with other
    rows.
    """
    yield {name: x for name, x in tensors.items() if name != "rng"}
    for num_bytes in (3, 17):
        yield {**tensors, "rng": torch.zeros(num_bytes, dtype=torch.uint8)}
    yield {**tensors, "rng": None}
    name, rows = max(tensors.items(), key=lambda pair: pair[1].nbytes * (pair[0] != "rng"))
    yield {**tensors, name: "rows"}
    yield {**tensors, name: rows[:-1]}
    yield {**tensors, name: torch.cat([rows] * 9)}


#: Values that are wrong for most entries of a config or a state.
NONSENSE: list[Any] = [
    None,
    float("nan"),
    float("inf"),
    -1,
    1 << 44,
    10**400,
    [],
    {},
    [5],
    "x",
    1.5,
    True,
]


def places_in(tree: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all entries of nested dicts and lists."""
    places = [place] if place else []
    if isinstance(tree, dict):
        entries = list(tree.items())
    else:
        entries = list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in entries:
        places += places_in(value, (*place, key))
    return places


def changed(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(tree)
    level = made
    for key in place[:-1]:
        level = level[key]
    level[place[-1]] = value
    return made


@every_case
@settings(max_examples=90)
@given(data=st.data())
def test_a_wrong_value_in_a_config_is_one_clear_error_or_loads_a_store_that_works(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / name.replace(" ", "_")
    if not folder.exists():
        store_of(name, "partly filled").save(folder)
        (folder / "config.json").write_text(json.dumps(config_of(folder / "config.json")))
    text = (folder / "config.json").read_text()
    place = data.draw(st.sampled_from(places_in(json.loads(text))))
    value = data.draw(st.sampled_from(NONSENSE))
    (folder / "config.json").write_text(json.dumps(changed(json.loads(text), place, value)))
    try:
        store = load_store(folder)
    except RolloutDataError as error:
        assert str(folder) in str(error)
    else:
        # A loaded option may not suit the draw, and a field may have another name.
        with suppress(RolloutDataError, KeyError):
            CASES[name].draw(store)
    finally:
        (folder / "config.json").write_text(text)


@every_case
@settings(max_examples=45)
@given(data=st.data())
def test_a_wrong_value_in_a_state_is_one_clear_error_or_loads_a_store_that_works(
    name: str, data: st.DataObject
) -> None:
    state = store_of(name, "partly filled").state_dict()
    place = data.draw(st.sampled_from(places_in(state)))
    value = data.draw(st.sampled_from(NONSENSE))
    store = store_of(name, "empty", seed=1)
    before = exact(store.state_dict())
    try:
        store.load_state_dict(changed(state, place, value))
    except RolloutDataError:
        assert exact(store.state_dict()) == before
    else:
        with suppress(RolloutDataError, KeyError):
            CASES[name].draw(store)


@pytest.mark.parametrize("name", ["rollout", "advanced", "dict", "expert", "z"])
def test_a_load_during_saves_returns_one_of_the_saves(tmp_path: Path, name: str) -> None:
    stores = [store_of(name, state) for state in ("partly filled", "overwritten")]
    known = [exact(store.state_dict()) for store in stores]
    assert known[0] != known[1]
    stores[0].save(tmp_path / "saved")
    child = os.fork()
    if not child:
        try:
            while True:
                for store in stores:
                    store.save(tmp_path / "saved")
        finally:
            os._exit(1)
    try:
        seen = [exact(load_store(tmp_path / "saved").state_dict()) for _ in range(30)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert all(state in known for state in seen)


@every_case
def test_a_folder_of_another_class_or_version_is_refused(tmp_path: Path, name: str) -> None:
    store = store_of(name, "partly filled")
    store.save(tmp_path / "b")
    for other in {type(CASES[case].make(0)) for case in CASES}:
        # Folders of earlier systems name other classes, so a buffer loads any rows that fit.
        are_buffers = isinstance(store, OF_EARLIER_SYSTEMS) and issubclass(
            other, OF_EARLIER_SYSTEMS
        )
        if not isinstance(store, other) and not are_buffers:
            with pytest.raises(ForeignFileError):
                other.load(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = config_of(path)
    for changed in ({"format": "other"}, {"version": 99}):
        path.write_text(json.dumps({**config, **changed}))
        with pytest.raises(ForeignFileError, match=str(tmp_path / "b")):
            load_store(tmp_path / "b")
    for text in ("[1", "[]", "[" * 100_000, ""):
        path.write_text(text)
        with pytest.raises(CorruptFileError, match=str(path)):
            load_store(tmp_path / "b")
    for place in (tmp_path / "none", columns_of(tmp_path / "b")):
        with pytest.raises(DataFileError, match=rf"{place}.* config\.json"):
            type(store).load(place)


@every_class
def test_a_save_never_replaces_other_files(tmp_path: Path, name: str) -> None:
    store = MAKERS[name]()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DataFileError, match=r"'notes\.txt'"):
        store.save(folder)
    with pytest.raises(DataFileError, match="is a file"):
        store.save(folder / "notes.txt")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "notes.txt"]
    assert (folder / "notes.txt").read_text() == "mine"
    shutil.rmtree(folder)
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    for _ in range(2):
        store.save(link)
    assert link.is_symlink()
    for place in (folder, link):
        assert plain(load_store(place).state_dict()) == plain(store.state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "link"}
