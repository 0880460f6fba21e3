"""The house rules that a machine can check; the table of floors and rooms is `MAY_IMPORT`.

A new file goes into the folder of a room, which it shares with files that it may import; a new room
gets a line.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Floor -> room -> rooms that it may import. All may import storage.errors; all except core may
#: import core. A room is a folder whose `__init__.py` says what it holds, or a single file.
MAY_IMPORT = {
    "storage": {
        "errors": "",
        "core": "",
        "codecs": "",
        "ring": "",
        "saving": "",
        "live": "",
        "onpolicy": "saving",
        "replay": "ring saving",
        "prioritized": "ring saving",
        "managed": "live prioritized ring saving",
        "checkpoints": "codecs live",
        "adapters": "managed onpolicy prioritized replay saving",
        "ray_actors": "live",
        "remote": "ray_actors",
    },
    "rollout_data": {
        "blocks": "codecs saving",
        "remote": "blocks saving",
        "sources": "blocks checkpoints remote",
        "playback": "blocks codecs live remote sources",
        "windows": "blocks live remote sources",
        "trajectories": "blocks checkpoints live sources",
        "writing": "blocks codecs onpolicy playback sources",
        "formats": "blocks codecs remote replay saving sources writing",
        "tools": "blocks formats remote saving sources writing",
        "__main__": "",
        "ray": "blocks remote windows writing",
    },
}
FLOORS = list(MAY_IMPORT)
#: Rooms that the floor's own `__init__` does not import: those of optional engines, imported by
#: their names, and `python -m rollout_data`.
APART = {"storage": {"remote"}, "rollout_data": {"ray", "__main__"}}
#: Rooms of rollout_data that know neither formats of other systems nor tools.
CORE_ROOMS = {"blocks", "remote", "sources", "playback", "windows", "trajectories", "writing"}
#: What else lies in the root folder of a floor.
ROOT_FILES = {"__init__.py", "py.typed"}
#: Imports, of a module by a module, that cross or close a circle today, and are to go.
NOT_YET: set[tuple[str, str]] = set()
#: Folder -> how many files it has today, if more than `MAX_FILES`. Is to shrink.
TOO_MANY_FILES: dict[str, int] = {
    "rollout_data/blocks": 15,
    "rollout_data/formats": 16,
    "rollout_data/formats/hdf5": 17,
    "rollout_data/writing": 16,
}
#: Room -> import levels of its files today, if more than `MAX_IMPORT_LEVELS`. Is to shrink.
TOO_DEEP: dict[str, int] = {"blocks": 7, "sources": 10, "tools": 10}
#: What the floors may import when they are imported; anything else is optional and imported where
#: it is used.
CORE_DEPENDENCIES = {"torch", "numpy", "h5py", "lz4", "tqdm"}
OPTIONAL_MODULES = (
    "PIL", "av", "blosc2", "fsspec", "gymnasium", "imagecodecs", "matplotlib", "mujoco", "numcodecs", "pandas",
    "pyarrow", "ray", "s3fs", "zarr", "zstandard",
)  # fmt: skip
#: What is imported at once where it is installed: which CRC-32 is quickest is decided before the
#: first one.
OPTIONAL_AT_IMPORT = {"zlib_ng"}
MAX_IMPORT_S = 1.0
#: Of a folder, its `__init__.py` included; of the files of a room.
MAX_FILES, MAX_IMPORT_LEVELS = 14, 6
#: Rooms are two levels deeper: the doctor examines recordings, a report shows what it found, and
#: tools call both.
MAX_ROOM_LEVELS = 8
LAYERS = (*FLOORS, "benchmarks", "examples", "tests")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


parsed = cache(ast.parse)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, root: Path, when: str = "ever") -> set[str]:
    """Name the modules that a file imports, each as deep as a file of this repository goes.

    Args:
        path: The file.
        root: What module names start from.
        when: "ever", "run" (not those for type checkers only) or "import" (nor those inside
            functions).
    """
    tree = tree_of(path)
    package = list(path.relative_to(root).parts[:-1])
    found: set[str] = set()
    for node in statements(tree, when):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                deeper = root.joinpath(*base, alias.name)
                is_module = deeper.with_suffix(".py").exists() or (deeper / "__init__.py").exists()
                found.add(".".join([*base, alias.name] if is_module else base))
    return found


def modules_named_as_text(path: Path) -> set[str]:
    """Name the modules that a file imports by `import_module("...")`, wherever: a function may run at import too."""
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    named = [
        call.args[0]
        for call in calls
        if ast.unparse(call.func).endswith("import_module") and call.args
    ]
    return {name.value for name in named if isinstance(name, ast.Constant)}


def statements(tree: ast.Module, when: str) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if (
            when != "ever"
            and isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            waiting.extend(node.orelse)
        elif when != "import" or not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        ):
            waiting.extend(ast.iter_child_nodes(node))


def room_of(module: str) -> str | None:
    """Name the room of a module, and the floor for the floor's own `__init__`; None if it is not ours."""
    floor, *rest = module.split(".")
    return (rest[0] if rest else floor) if floor in MAY_IMPORT else None


def may_import(module: str) -> set[str]:
    """Name the rooms that a module may import, its own among them."""
    floor, room = module.split(".")[0], room_of(module)
    below = [name for one in FLOORS[: FLOORS.index(floor)] for name in (one, *MAY_IMPORT[one])]
    if room == floor:
        return {*below, *MAY_IMPORT[floor]}
    listed = set(MAY_IMPORT[floor][room].split())
    shared = {"errors"} if room in ("errors", "core") else {"errors", "core"}
    return (listed & {*below, *MAY_IMPORT[floor]}) - set(FLOORS) | shared | {room}


def room_graph(floor: str) -> dict[str, set[str]]:
    """Room -> rooms of its floor that it may import; the floor's `__init__` stands above all."""
    own = MAY_IMPORT[floor]
    graph = {room: (may_import(f"{floor}.{room}") & set(own)) - {room} for room in own}
    return {**graph, floor: set(own) - APART[floor]}


def import_graph(root: Path, *folders: str) -> dict[str, set[str]]:
    """Module -> all modules that it ever imports, also inside functions and for type checkers only."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {module_name(path, root): imported_modules(path, root) for path in paths}


def crossings(root: Path) -> list[tuple[str, str]]:
    """List every import of a room that the importer's line in `MAY_IMPORT` does not name: (importer, imported)."""
    found = [
        (one, other)
        for one, others in import_graph(root, *FLOORS).items()
        for other in sorted(others)
    ]
    return [
        (one, other)
        for one, other in found
        if room_of(other) and room_of(other) not in may_import(one)
    ]


def levels(graph: dict[str, set[str]]) -> int:
    """Count the nodes on the longest way down a graph without cycles."""
    depths: dict[str, int] = {}

    def depth(node: str) -> int:
        if node not in depths:
            depths[node] = 1 + max(
                (depth(other) for other in graph[node] if other in graph), default=0
            )
        return depths[node]

    return max(map(depth, graph), default=0)


def without(graph: dict[str, set[str]], edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    return {
        one: {other for other in others if (one, other) not in edges}
        for one, others in graph.items()
    }


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List one import cycle per module that can reach itself."""
    found = []
    for start in sorted(graph):
        came_from = {start: ""}
        waiting = [start]
        while waiting:
            node = waiting.pop()
            for following in graph.get(node, ()):
                if following == start:
                    chain = [start]
                    while node:
                        chain.append(node)
                        node = came_from[node]
                    found.append(chain[::-1])
                    waiting = []
                    break
                if following in graph and following not in came_from:
                    came_from[following] = node
                    waiting.append(following)
    return found


def test_rooms_import_only_rooms_of_their_line() -> None:
    assert [one for one in crossings(ROOT) if one not in NOT_YET] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("storage/core/fields.py", "import rollout_data"),
        ("storage/errors.py", "from rollout_data.blocks import x"),
        ("storage/errors.py", "from .core import tree"),
        ("storage/core/fields.py", "from ..ring.windows import Windows"),
        ("storage/core/fields.py", "def f():\n    from ..codecs import codecs"),
        ("storage/core/fields.py", "from .. import Schema"),
        (
            "storage/core/fields.py",
            "if TYPE_CHECKING:\n    from rollout_data import RolloutDataset",
        ),
        ("rollout_data/blocks/trajectory_index.py", "from ..writing.writer import RolloutWriter"),
        ("rollout_data/formats/expert_trajectories.py", "from storage import TrajectoryDictBuffer"),
        ("rollout_data/playback/transition.py", "from ..formats.expert_trajectories import load"),
    ],
)
def test_a_planted_crossing_is_found(tmp_path: Path, file: str, line: str) -> None:
    made = [
        "storage/__init__.py",
        "storage/core/fields.py",
        "storage/codecs/codec_chains.py",
        "rollout_data/__init__.py",
    ]
    for name in (*made, file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert crossings(tmp_path) == []
    (tmp_path / file).write_text(line + "\n")
    assert len(crossings(tmp_path)) == 1


def test_the_core_knows_neither_formats_nor_tools() -> None:
    lines = MAY_IMPORT["rollout_data"]
    assert {room for room in lines if {"formats", "tools"} & set(lines[room].split())} == {"tools"}
    assert CORE_ROOMS | {"formats", "tools", "__main__", "ray"} == set(lines)


def test_every_room_has_a_line_and_every_line_is_needed() -> None:
    for floor, rooms in MAY_IMPORT.items():
        folders = [path for path in (ROOT / floor).iterdir() if list(path.rglob("*.py"))]
        files = {
            path.name
            for path in (ROOT / floor).iterdir()
            if path.is_file() and path.suffix != ".md"
        }
        single = {room for room in rooms if f"{room}.py" in files}
        assert {path.name for path in folders} == set(rooms) - single
        assert files == ROOT_FILES | {f"{room}.py" for room in single}
    imported: dict[str, set[str]] = {}
    for module, others in import_graph(ROOT, *FLOORS).items():
        imported.setdefault(str(room_of(module)), set()).update(map(str, map(room_of, others)))
    listed = {
        room: set(line.split()) for rooms in MAY_IMPORT.values() for room, line in rooms.items()
    }
    assert {
        room: rooms - imported[room] for room, rooms in listed.items() if rooms - imported[room]
    } == {}


@pytest.mark.parametrize("floor", FLOORS)
def test_the_init_of_a_room_holds_one_line_that_says_what_the_room_is(floor: str) -> None:
    for path in sorted((ROOT / floor).glob("*/**/__init__.py")):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) == 1 and ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("floor", FLOORS)
def test_the_rooms_of_a_floor_have_no_cycle_and_are_not_deep(floor: str) -> None:
    assert cycles(room_graph(floor)) == []
    assert levels(room_graph(floor)) <= MAX_ROOM_LEVELS


def test_no_room_is_deep() -> None:
    rooms: dict[str, dict[str, set[str]]] = {}
    for module, imported in without(import_graph(ROOT, *FLOORS), NOT_YET).items():
        rooms.setdefault(str(room_of(module)), {})[module] = imported
    deep = {room: levels(files) for room, files in rooms.items()}
    assert {room: depth for room, depth in deep.items() if depth > MAX_IMPORT_LEVELS} == TOO_DEEP


def test_levels_are_those_of_the_longest_way() -> None:
    assert levels({}) == 0
    assert levels({"a": {"b", "d"}, "b": {"c"}, "c": {"elsewhere"}, "d": set()}) == 3


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(without(import_graph(ROOT, *FLOORS, "benchmarks"), NOT_YET)) == []
    assert cycles({"a": {"b"}, "b": {"c", "os"}, "c": {"a"}, "d": {"a"}})[0] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("edge", sorted(NOT_YET))
def test_what_is_not_yet_as_it_should_be_still_is_not(edge: tuple[str, str]) -> None:
    graph = import_graph(ROOT, *FLOORS)
    assert edge[1] in graph[edge[0]], "is no longer imported: remove it from NOT_YET"
    without_others = without(graph, NOT_YET - {edge})
    assert edge in crossings(ROOT) or cycles(without_others), (
        "is allowed now: remove it from NOT_YET"
    )


def test_no_folder_holds_more_files_than_can_be_overlooked() -> None:
    folders = {path.parent for path in python_files(*FLOORS)}
    counts = {
        folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders
    }
    assert {
        folder: count for folder, count in counts.items() if count > MAX_FILES
    } == TOO_MANY_FILES


@pytest.mark.parametrize(
    "path", python_files(*FLOORS), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_module_imports_only_core_dependencies_and_by_itself(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path, ROOT, "import")}
    roots |= {name.split(".")[0] for name in modules_named_as_text(path)}
    strangers = (
        roots - set(sys.stdlib_module_names) - CORE_DEPENDENCIES - set(FLOORS) - OPTIONAL_AT_IMPORT
    )
    assert not strangers, f"optional packages are imported where they are used: {sorted(strangers)}"
    importlib.import_module(module_name(path, ROOT))


@pytest.mark.parametrize(
    "path", python_files(*FLOORS), ids=lambda path: str(path.relative_to(ROOT))
)
def test_all_is_sorted_and_true(path: Path) -> None:
    module = importlib.import_module(module_name(path, ROOT))
    names = list(getattr(module, "__all__", ()))
    assert names == sorted(set(names)) and not set(names) & set(dir(builtins))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_shows_exactly_what_it_imports_for_others(floor: str) -> None:
    package = importlib.import_module(floor)
    tree = tree_of(ROOT / floor / "__init__.py")
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
    ]
    homes = {
        alias.name: "." * node.level + str(node.module) for node in imports for alias in node.names
    }
    builtin_names = homes.keys() & set(dir(builtins))  # a star import would replace them
    assert set(homes) - builtin_names == set(package.__all__) and set(homes) <= set(dir(package))
    for name, home in homes.items():
        assert getattr(package, name) is getattr(importlib.import_module(home, floor), name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018


#: Private by their names, and documented by Python, or the only way in torch.
FOREIGN_PRIVATES = {
    "_asdict",
    "_fields",
    "_foreach_copy_",
    "_make",
    "_new_shared",
    "_replace",
    "_version",
}


def privates_of_others(text: str) -> list[str]:
    """List uses of private names that a file does not define itself: `other._x`, `from m import _x`."""
    tree, own, used = parsed(text), set(FOREIGN_PRIVATES), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            used += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            own.update([node.attr] if is_own else ())
            used += [] if is_own else [(node.attr, ast.unparse(node))]
    return [
        shown
        for name, shown in used
        if name.startswith("_") and not name.startswith("__") and name not in own
    ]


def test_no_file_reaches_into_the_private_names_of_another() -> None:
    found = {
        path: privates_of_others(path.read_text(encoding="utf-8")) for path in python_files(*FLOORS)
    }
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}
    assert privates_of_others("from m import _x\nself._a = 1\nother._a\nother._b") == [
        "_x",
        "other._b",
    ]


def test_an_assert_calls_nothing_that_changes_anything() -> None:
    # With -O asserts are gone, and what they did with them.
    allowed = {"isinstance", "len", "any", "all", "count"}
    found = []
    for path in python_files(*FLOORS, "benchmarks", "examples"):
        for node in ast.walk(tree_of(path)):
            calls = (
                [one for one in ast.walk(node) if isinstance(one, ast.Call)]
                if isinstance(node, ast.Assert)
                else []
            )
            if {ast.unparse(call.func).rpartition(".")[2] for call in calls} - allowed:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_importing_a_floor_is_quick_and_takes_no_optional_package_along() -> None:
    script = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"  # of this process: others may keep the processors busy
        "import storage\n"
        "from rollout_data import *\n"
        "print(time.process_time() - start)\n"
        f"print(*[name for name in {OPTIONAL_MODULES!r} if name in sys.modules])\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout.splitlines()[1].split() == []
    assert min(float(run.stdout.splitlines()[0]) for run in runs) < MAX_IMPORT_S
