"""Rules of the source tree that a program can check. `MAY_IMPORT` lists packages and their rooms.

A room is a folder of a package whose `__init__.py` describes its subject, or a single file. A new
file goes into a room whose imports it needs. A new room needs a line in `MAY_IMPORT`.
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

#: Package -> room -> rooms that the room may import. Every room may import storage.errors. Every
#: room except core may import core.
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
PACKAGES = list(MAY_IMPORT)
#: Room -> its folders -> folders of the room that the folder may import. "" means the files
#: directly in the room, which every folder of the room may import.
FOLDERS_MAY_IMPORT = {
    "sources": {
        "": "processes rows",
        "processes": "",
        "rows": "processes",
        "recordings": "rows",
        "trajectory_checkpoints": "recordings",
    },
    "formats": {
        "": "arrays hdf5",  # The detection of formats, and `load_expert_trajectories`.
        "arrays": "records",
        "hdf5": "",
        "lerobot": "",
        "minari": "hdf5",
        "records": "",
        "rlinf": "arrays",
        "trajectory_folders": "",
    },
    "tools": {
        "": "cli",
        "cli": "doctor edit report",
        "doctor": "",
        "edit": "doctor",
        "report": "doctor",
    },
}
#: Modules that a file imports by name at a call. They are the registry through which the core
#: reaches formats, without importing them.
IMPORTED_BY_NAME = {
    "rollout_data.sources.format_registry": {
        "rollout_data.formats.registry",
        "rollout_data.formats.trajectory_folders.trajectory_folder_scanner",
        "rollout_data.formats.trajectory_folders.trajectory_listing",
    },
}
#: Files that import modules whose names they compute: lazy packages, tables of formats, commands
#: and codecs, and optional packages.
COMPUTES_NAMES = {
    "rollout_data",
    "rollout_data.formats.input_checks",
    "rollout_data.formats.registry",
    "rollout_data.tools.cli.command_line",
    "storage",
    "storage.codecs.packers",
}
#: Class names that occur in two modules of a package, because a user imports either by its module.
REPEATED_CLASSES = {"ReplayBuffer"}  # torchrl's view has torchrl's name.
#: Rooms that the `__init__` of the package does not import: rooms of optional packages, which users
#: import by name, and `python -m rollout_data`.
APART = {"storage": {"remote"}, "rollout_data": {"ray", "__main__"}}
#: Rooms of rollout_data that know neither formats of other systems nor tools.
CORE_ROOMS = {"blocks", "remote", "sources", "playback", "windows", "trajectories", "writing"}
#: Consumers of episodes: rooms and modules that read data only through `EpisodeSource`.
CONSUMERS = (
    "rollout_data.playback",
    "rollout_data.windows",
    "rollout_data.sources.recordings",
    "rollout_data.formats.convert",
    "rollout_data.formats.conversion_resume",
    "rollout_data.tools.cli",
    "rollout_data.tools.doctor",
    "rollout_data.tools.report",
)
#: Modules that consumers do not import: the kinds of sources, and the blocks of a folder.
KINDS_OF_SOURCES = {
    "rollout_data.blocks.block_folder",
    "rollout_data.remote.remote_folder",
    "rollout_data.sources.block_scanner",
    "rollout_data.sources.file_scanner",
    "rollout_data.sources.rows.joined_files",
    "rollout_data.sources.rows.mapped_blocks",
    "rollout_data.sources.rows.mapped_files",
    "rollout_data.sources.rows.remote_blocks",
    "rollout_data.sources.rows.unmapped_rows",
}
#: (consumer, imported module) pairs that are allowed, each with its reason.
ABOUT_FILES = {
    # The doctor describes damaged files, which no source can open.
    ("rollout_data.tools.doctor.file_facts", "rollout_data.blocks.block_folder"),
    # Statistics are stored beside the index cache, with the same stamp of the files.
    ("rollout_data.sources.recordings.field_statistics", "rollout_data.blocks.block_folder"),
    # Recordings in a folder are found by the names of files.
    ("rollout_data.sources.recordings.recordings_in_folder", "rollout_data.blocks.block_folder"),
    # `open_episodes` makes the source; a single file is opened by its format.
    ("rollout_data.sources.recordings.open_episodes", "rollout_data.sources.block_scanner"),
    ("rollout_data.sources.recordings.open_episodes", "rollout_data.sources.file_scanner"),
    ("rollout_data.sources.recordings.recording", "rollout_data.sources.file_scanner"),
}
#: Files in the root folder of a package beside its rooms.
ROOT_FILES = {"__init__.py", "py.typed"}
#: Folder -> number of its files, if more than `MAX_FILES`.
TOO_MANY_FILES: dict[str, int] = {
    "rollout_data/formats": 16,
    "rollout_data/formats/hdf5": 17,
    "rollout_data/writing": 16,
}
#: Room -> import levels of its files, if more than `MAX_IMPORT_LEVELS`.
TOO_DEEP: dict[str, int] = {"blocks": 7, "sources": 10, "tools": 10}
#: Packages that ours may import when they are imported. Other packages are optional, and imported
#: by the functions that use them.
CORE_DEPENDENCIES = {"torch", "numpy", "h5py", "lz4", "tqdm"}
OPTIONAL_MODULES = (
    "PIL", "av", "blosc2", "fsspec", "gymnasium", "imagecodecs", "matplotlib", "mujoco", "numcodecs", "pandas",
    "pyarrow", "ray", "s3fs", "zarr", "zstandard",
)  # fmt: skip
#: Optional packages that are imported with ours if installed: the fastest CRC-32 is chosen before
#: the first use.
OPTIONAL_AT_IMPORT = {"zlib_ng"}
MAX_IMPORT_S = 1.0
#: Maximum number of files of a folder with its `__init__.py`; maximum import levels of a room.
MAX_FILES, MAX_IMPORT_LEVELS = 14, 6
#: Maximum import levels of rooms: the doctor examines recordings, a report shows its results, and
#: tools call both.
MAX_ROOM_LEVELS = 8
LAYERS = (*PACKAGES, "benchmarks", "examples", "tests")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


parsed = cache(ast.parse)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, root: Path, when: str = "ever") -> set[str]:
    """Return the modules that a file imports. `from a import b` is module a.b if b is a module.

    Args:
        path: The file.
        root: Folder of the packages.
        when: "ever"; "run" to leave out imports for type checkers; "import" to leave out imports
            inside functions as well.
    """
    tree = tree_of(path)
    package = list(path.relative_to(root).parts[:-1])
    modules: set[str] = set()
    for node in statements(tree, when):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                deeper = root.joinpath(*base, alias.name)
                is_module = deeper.with_suffix(".py").exists() or (deeper / "__init__.py").exists()
                modules.add(".".join([*base, alias.name] if is_module else base))
    return modules


def imports_by_name(text: str) -> tuple[set[str], bool]:
    """Find calls of `import_module`, `resolve_name` and `__import__` in the text of a file.

    Returns:
        The modules named by a constant, and whether a call computes the name of the module.
    """
    tree = parsed(text)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names: set[str] = set()
    is_computed = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        if function not in ("import_module", "resolve_name", "__import__"):
            continue
        argument = node.args[0]
        if isinstance(argument, ast.Constant):
            names.add(argument.value)
        elif isinstance(argument, ast.Name) and argument.id in constants:
            names.add(constants[argument.id])
        else:
            is_computed = True
    return names, is_computed


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
    """Return the room of a module; for a package its own name; None for modules of others."""
    package, *rest = module.split(".")
    return (rest[0] if rest else package) if package in MAY_IMPORT else None


def may_import(module: str) -> set[str]:
    """Return the rooms that a module may import, with its own."""
    package = module.split(".")[0]
    room = room_of(module)
    below: set[str] = set()
    for lower in PACKAGES[: PACKAGES.index(package)]:
        below |= {lower, *MAY_IMPORT[lower]}
    if room == package:
        return {*below, *MAY_IMPORT[package]}
    listed = set(MAY_IMPORT[package][str(room)].split())
    shared = {"errors"} if room in ("errors", "core") else {"errors", "core"}
    return (listed & {*below, *MAY_IMPORT[package]}) - set(PACKAGES) | shared | {str(room)}


def room_graph(package: str) -> dict[str, set[str]]:
    """Map rooms to the rooms of their package that they may import, and the package to its rooms."""
    rooms = MAY_IMPORT[package]
    graph = {room: (may_import(f"{package}.{room}") & set(rooms)) - {room} for room in rooms}
    return {**graph, package: set(rooms) - APART[package]}


def import_graph(root: Path, *folders: str) -> dict[str, set[str]]:
    """Map modules to the modules that they import anywhere, also inside functions."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {module_name(path, root): imported_modules(path, root) for path in paths}


def crossings(root: Path) -> list[tuple[str, str]]:
    """Return the forbidden imports (importer, imported) between rooms and between their folders."""
    wrong = []
    for importer, modules in import_graph(root, *PACKAGES).items():
        for imported in sorted(modules):
            room = room_of(imported)
            if not room:
                continue
            is_same_room = importer.split(".")[:2] == imported.split(".")[:2]
            is_allowed = room in may_import(importer)
            if is_same_room:
                is_allowed = may_import_folder(room, importer, imported, root)
            if not is_allowed:
                wrong.append((importer, imported))
    return wrong


def folder_of(module: str, root: Path) -> str:
    """Return the folder of a module in its room; "" for a file directly in the room."""
    package, room, *rest = module.split(".")
    is_folder = bool(rest) and (root / package / room / rest[0]).is_dir()
    return rest[0] if is_folder else ""


def may_import_folder(room: str, importer: str, imported: str, root: Path) -> bool:
    """Return whether a module may import another module of its room, by their folders."""
    if room not in FOLDERS_MAY_IMPORT:
        return True
    source = folder_of(importer, root)
    target = folder_of(imported, root)
    return target in ("", source, *FOLDERS_MAY_IMPORT[room][source].split())


def levels(graph: dict[str, set[str]]) -> int:
    """Return the number of nodes on the longest path of a graph without cycles."""
    depths: dict[str, int] = {}

    def depth(node: str) -> int:
        if node not in depths:
            depths[node] = 1 + max(
                (depth(other) for other in graph[node] if other in graph), default=0
            )
        return depths[node]

    return max(map(depth, graph), default=0)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return one import cycle for each module that imports itself through others."""
    chains = []
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
                    chains.append(chain[::-1])
                    waiting = []
                    break
                if following in graph and following not in came_from:
                    came_from[following] = node
                    waiting.append(following)
    return chains


def test_rooms_import_only_the_rooms_that_the_table_allows() -> None:
    assert crossings(ROOT) == []


def test_consumers_read_episodes_only_through_their_source() -> None:
    graph = import_graph(ROOT, *PACKAGES)
    consumers = [name for name in graph if f"{name}.".startswith(tuple(f"{c}." for c in CONSUMERS))]
    pairs = {(name, kind) for name in consumers for kind in graph[name] & KINDS_OF_SOURCES}
    assert pairs == ABOUT_FILES
    assert graph.keys() >= KINDS_OF_SOURCES
    for consumer in CONSUMERS:
        assert any(f"{name}.".startswith(f"{consumer}.") for name in consumers), consumer


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
        ("rollout_data/formats/lerobot/reader.py", "from ..hdf5 import reader"),
        ("rollout_data/sources/rows/rows.py", "from ..recordings import reader"),
    ],
)
def test_a_forbidden_import_is_reported(tmp_path: Path, file: str, line: str) -> None:
    other_files = [
        "storage/__init__.py",
        "storage/core/fields.py",
        "storage/codecs/codec_chains.py",
        "rollout_data/__init__.py",
        "rollout_data/formats/hdf5/reader.py",
        "rollout_data/sources/recordings/reader.py",
    ]
    for name in (*other_files, file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert crossings(tmp_path) == []
    (tmp_path / file).write_text(line + "\n")
    assert len(crossings(tmp_path)) == 1


def test_modules_are_imported_by_name_only_through_registries() -> None:
    by_name: dict[str, set[str]] = {}
    computing: set[str] = set()
    for path in python_files(*PACKAGES):
        names, is_computed = imports_by_name(path.read_text(encoding="utf-8"))
        module = module_name(path, ROOT)
        ours = {name for name in names if room_of(name)}
        if ours:
            by_name[module] = ours
        if is_computed:
            computing.add(module)
    assert by_name == IMPORTED_BY_NAME
    assert computing == COMPUTES_NAMES
    assert imports_by_name('A = "a.b"\nf.import_module(A)\n__import__("c")') == (
        {"a.b", "c"},
        False,
    )
    assert imports_by_name("import_module(f'x.{y}')") == (set(), True)


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_classes_of_a_package_have_unique_names(package: str) -> None:
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in python_files(package):
        module = module_name(path, ROOT)
        if path.stem not in ("__init__", "__main__"):
            files.setdefault(path.stem, []).append(module)
        for node in ast.walk(tree_of(path)):
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if is_public and node.name not in REPEATED_CLASSES:
                classes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in files.items() if len(modules) > 1} == {}
    assert {name: modules for name, modules in classes.items() if len(modules) > 1} == {}


def test_the_core_imports_neither_formats_nor_tools() -> None:
    lines = MAY_IMPORT["rollout_data"]
    assert {room for room in lines if {"formats", "tools"} & set(lines[room].split())} == {"tools"}
    assert CORE_ROOMS | {"formats", "tools", "__main__", "ray"} == set(lines)


def test_each_room_has_a_line_and_each_line_a_room() -> None:
    for package, rooms in MAY_IMPORT.items():
        folders = [path for path in (ROOT / package).iterdir() if list(path.rglob("*.py"))]
        files = {
            path.name
            for path in (ROOT / package).iterdir()
            if path.is_file() and path.suffix != ".md"
        }
        single = {room for room in rooms if f"{room}.py" in files}
        assert {path.name for path in folders} == set(rooms) - single
        assert files == ROOT_FILES | {f"{room}.py" for room in single}
    imported: dict[str, set[str]] = {}
    for module, others in import_graph(ROOT, *PACKAGES).items():
        imported.setdefault(str(room_of(module)), set()).update(map(str, map(room_of, others)))
    listed = {
        room: set(line.split()) for rooms in MAY_IMPORT.values() for room, line in rooms.items()
    }
    assert {
        room: rooms - imported[room] for room, rooms in listed.items() if rooms - imported[room]
    } == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_init_of_a_room_is_one_line_that_describes_the_room(package: str) -> None:
    for path in sorted((ROOT / package).glob("*/**/__init__.py")):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) == 1 and ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_have_no_import_cycle_and_few_levels(package: str) -> None:
    assert cycles(room_graph(package)) == []
    assert levels(room_graph(package)) <= MAX_ROOM_LEVELS


def test_files_of_a_room_have_few_import_levels() -> None:
    rooms: dict[str, dict[str, set[str]]] = {}
    for module, imported in import_graph(ROOT, *PACKAGES).items():
        rooms.setdefault(str(room_of(module)), {})[module] = imported
    deep = {room: levels(files) for room, files in rooms.items()}
    assert {room: depth for room, depth in deep.items() if depth > MAX_IMPORT_LEVELS} == TOO_DEEP


def test_levels_count_the_longest_path() -> None:
    assert levels({}) == 0
    assert levels({"a": {"b", "d"}, "b": {"c"}, "c": {"elsewhere"}, "d": set()}) == 3


def test_no_module_imports_itself_indirectly() -> None:
    assert cycles(import_graph(ROOT, *PACKAGES, "benchmarks")) == []
    assert cycles({"a": {"b"}, "b": {"c", "os"}, "c": {"a"}, "d": {"a"}})[0] == ["a", "b", "c", "a"]


def test_folders_have_few_files() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    counts = {
        folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders
    }
    assert {
        folder: count for folder, count in counts.items() if count > MAX_FILES
    } == TOO_MANY_FILES


@pytest.mark.parametrize(
    "path", python_files(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT))
)
def test_each_module_imports_alone_with_core_dependencies_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path, ROOT, "import")}
    roots |= {name.split(".")[0] for name in imports_by_name(path.read_text(encoding="utf-8"))[0]}
    optional = (
        roots
        - set(sys.stdlib_module_names)
        - CORE_DEPENDENCIES
        - set(PACKAGES)
        - OPTIONAL_AT_IMPORT
    )
    assert not optional, f"import these packages in the functions that use them: {sorted(optional)}"
    importlib.import_module(module_name(path, ROOT))


@pytest.mark.parametrize(
    "path", python_files(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT))
)
def test_all_is_sorted_and_its_names_exist(path: Path) -> None:
    module = importlib.import_module(module_name(path, ROOT))
    names = list(getattr(module, "__all__", ()))
    assert names == sorted(set(names)) and not set(names) & set(dir(builtins))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_exports_exactly_the_names_that_it_imports(name: str) -> None:
    package = importlib.import_module(name)
    tree = tree_of(ROOT / name / "__init__.py")
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
    ]
    homes = {
        alias.name: "." * node.level + str(node.module) for node in imports for alias in node.names
    }
    builtin_names = homes.keys() & set(dir(builtins))  # A star import would replace them.
    assert set(homes) - builtin_names == set(package.__all__) and set(homes) <= set(dir(package))
    for public, home in homes.items():
        assert getattr(package, public) is getattr(importlib.import_module(home, name), public)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018


#: Private names that Python documents, or that are the only way in torch.
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
    """Return uses of private names that a file does not define: `other._x`, `from m import _x`."""
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


def test_no_file_uses_private_names_of_another() -> None:
    uses = {
        str(path.relative_to(ROOT)): privates_of_others(path.read_text(encoding="utf-8"))
        for path in python_files(*PACKAGES)
    }
    assert {path: names for path, names in uses.items() if names} == {}
    assert privates_of_others("from m import _x\nself._a = 1\nother._a\nother._b") == [
        "_x",
        "other._b",
    ]


#: Words that say nothing about a value. Names of variables are nouns of the domain.
NOT_NAMES = {
    "found",
    "given",
    "gone",
    "look",
    "one",
    "said",
    "sights",
    "stand_ins",
    "told",
    "traps",
}


def test_variables_have_names_that_describe_their_values() -> None:
    wrong = []
    for path in python_files(*PACKAGES):
        for node in ast.walk(tree_of(path)):
            is_written = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_written else getattr(node, "arg", None)
            if name in NOT_NAMES:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []


def test_asserts_change_nothing() -> None:
    # `python -O` removes asserts and their calls.
    allowed = {"isinstance", "len", "any", "all", "count"}
    wrong = []
    for path in python_files(*PACKAGES, "benchmarks", "examples"):
        asserts = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
        for node in asserts:
            calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
            if {ast.unparse(call.func).rpartition(".")[2] for call in calls} - allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_importing_our_packages_is_quick_and_imports_no_optional_package() -> None:
    script = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"  # Other processes do not count.
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
