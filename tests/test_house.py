"""The house rules that a machine can check; the table of floors and rooms is `HOUSE`.

A new file is added in one place: its line in `HOUSE`, below everything that it imports.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Floor -> its modules in order: a module imports only from the lines above it and from lower floors.
#: A name that ends in "/" is a package: one place for all of its files, which keep their own order by having no cycle.
HOUSE = {
    "storage": [
        "errors",
        "duplicates",
        "durable",
        "tree",
        "fields",
        "modes",
        "buffer_pool",
        "host_arrays",
        "prefix_sum",
        "priorities",
        "samplers",
        "records",
        "row_layout",
        "row_cut",
        "held_steps",
        "ring",
        "pairs",
        "segments",
        "windows",
        "end_flags",
        "final_rows",
        "transitions",
        "stream_order",
        "checksums",
        "plain_files",
        "hdf5_files",
        "column_files",
        "buffer_files",
        "tree_scratch",
        "sum_tree",
        "segment_tree",
        "scans",
        "returns",
        "padding",
        "lz4_blocks",
        "shuffles",
        "quantizers",
        "extra_packers",
        "chunk_codecs",
        "codecs",
        "work_split",
        "image_blobs",
        "image_sequences",
        "background",
        "monitors",
        "object_copy",
        "lz4_frames",
        "snapshot",
        "transition",
        "columns",
        "column_table",
        "hidden_states",
        "delivery",
        "mini_batches",
        "rollout_storage",
        "queue_rollout_storage",
        "sarsa_rollout_storage",
        "replay_buffer",
        "ring_buffer",
        "dict_buffer",
        "trajectory_buffer",
        "episodes",
        "episode_buffer",
        "z_buffer",
        "managed/",
        "checkpoint_files",
        "checkpoint",
        "prefetch",
        "compressed",
        "remote",
        "adapters/",
    ],
    "rollout_data": [
        "layout",
        "chunk_table",
        "block_header",
        "row_source",
        "coded_rows",
        "row_writing",
        "block_file",
        "index",
        "block_folder",
        "metadata",
        "arena",
        "chunk_files",
        "frames",
        "file_frames",
        "sharding",
        "dataset_arguments",
        "formats/",
        "source_base",
        "folder_source",
        "sources",
        "agreement",
        "losses",
        "passes",
        "cursor",
        "dealer",
        "transition",
        "batches",
        "lookup",
        "readahead",
        "resume",
        "prefetch",
        "base",
        "stream",
        "rollout_dataset",
        "delivery",
        "window_index",
        "window_fields",
        "window_reader",
        "window_batch",
        "quantiles",
        "normalization",
        "window_dataset",
        "window_mixture",
        "window_loader",
        "observation_parts",
        "given_record",
        "record",
        "repeated_step",
        "cutting",
        "step_buffer",
        "staging",
        "journal",
        "retention",
        "publishing",
        "tally",
        "writer_arguments",
        "writer",
        "simulators",
        "recording",
        "repair",
        "packing",
        "trajectories/",
        "trajectory_replay_buffer",
        "expert",
        "cli/",
    ],
}
FLOORS = list(HOUSE)
#: What the floors may import when they are imported; anything else is optional and imported where it is used.
CORE_DEPENDENCIES = {"torch", "numpy", "h5py", "lz4", "tqdm"}
OPTIONAL_MODULES = ("blosc2", "gymnasium", "matplotlib", "mujoco", "pandas", "pyarrow", "ray", "zarr", "zstandard")
#: What is imported at once where it is installed: which CRC-32 is quickest is decided before the first one.
OPTIONAL_AT_IMPORT = {"zlib_ng"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_IMPORT_S = 450, 50, 1.0
LAYERS = (*FLOORS, "benchmarks", "examples", "tests")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, root: Path, when: str = "ever") -> set[str]:
    """Name the modules that a file imports, each as deep as a file of this repository goes.

    Args:
        path: The file.
        root: What module names start from.
        when: "ever", "run" (not those for type checkers only) or "import" (nor those inside functions).
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
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
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if ast.unparse(call.func).endswith("import_module") and call.args]
    return {name.value for name in named if isinstance(name, ast.Constant)}


def statements(tree: ast.Module, when: str) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if when != "ever" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif when != "import" or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def place(module: str) -> tuple[int, int] | None:
    """Say where a module stands, (floor, line); the package itself stands above its lines. None if it is not ours.

    Raises:
        KeyError: The module lies on one of our floors and has no line in `HOUSE`.
    """
    floor, *rest = module.split(".")
    if floor not in HOUSE:
        return None
    lines = HOUSE[floor]
    if not rest:
        return FLOORS.index(floor), len(lines)
    for line in (rest[0], rest[0] + "/"):
        if line in lines:
            return FLOORS.index(floor), lines.index(line)
    raise KeyError(f"{module} has no line in HOUSE of tests/test_house.py: add it below everything that it imports")


def in_one_package(module: str) -> bool:
    """Tell whether a module's line stands for a whole package, whose files may import each other."""
    floor, *rest = module.split(".")
    return bool(rest) and rest[0] + "/" in HOUSE[floor]


def crossings(root: Path) -> list[str]:
    """List every import that goes up, sideways in the wrong order, or to the package from inside it."""
    wrong = []
    for path in (path for floor in FLOORS for path in sorted((root / floor).rglob("*.py"))):
        importer = module_name(path, root)
        here = place(importer)
        when_run = imported_modules(path, root, "run")
        for imported in sorted(imported_modules(path, root)):
            there = place(imported)
            if there is None or there < here or (there == here and in_one_package(importer)):
                continue
            if there[0] == here[0] and imported not in when_run:
                continue  # a type to be named, on the own floor
            wrong.append(f"{importer} imports {imported}, which does not lie below it")
    return wrong


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


def test_every_import_points_down_the_house() -> None:
    assert crossings(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("storage/fields.py", "import rollout_data"),
        ("storage/errors.py", "from rollout_data.index import x"),
        ("storage/tree.py", "from .fields import Field"),
        ("storage/fields.py", "def f():\n    from . import codecs"),
        ("storage/fields.py", "from . import Schema"),
        ("storage/tree.py", "if TYPE_CHECKING:\n    from rollout_data import RolloutDataset"),
        ("rollout_data/index.py", "from .writer import RolloutWriter"),
        ("rollout_data/formats/folder.py", "from rollout_data.cli.main import main"),
    ],
)
def test_a_planted_crossing_is_found(tmp_path: Path, file: str, line: str) -> None:
    made = ["storage/__init__.py", "storage/codecs.py", "rollout_data/__init__.py", "rollout_data/cli/main.py"]
    for name in (*made, file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert crossings(tmp_path) == []
    (tmp_path / file).write_text(line + "\n")
    assert len(crossings(tmp_path)) == 1


def test_a_file_without_a_line_in_the_house_is_found(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "utils.py").touch()
    with pytest.raises(KeyError, match=r"storage.utils has no line in HOUSE"):
        crossings(tmp_path)


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module_name(path, ROOT): imported_modules(path, ROOT, "run") for path in python_files(*FLOORS, "benchmarks")
    }
    assert cycles(graph) == []
    assert cycles({"a": {"b"}, "b": {"c", "os"}, "c": {"a"}, "d": {"a"}})[0] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("path", python_files(*FLOORS), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_core_dependencies_and_by_itself(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path, ROOT, "import")}
    roots |= {name.split(".")[0] for name in modules_named_as_text(path)}
    strangers = roots - set(sys.stdlib_module_names) - CORE_DEPENDENCIES - set(FLOORS) - OPTIONAL_AT_IMPORT
    assert not strangers, f"optional packages are imported where they are used: {sorted(strangers)}"
    importlib.import_module(module_name(path, ROOT))


@pytest.mark.parametrize("path", python_files(*FLOORS), ids=lambda path: str(path.relative_to(ROOT)))
def test_all_is_sorted_and_true(path: Path) -> None:
    module = importlib.import_module(module_name(path, ROOT))
    names = list(getattr(module, "__all__", ()))
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_shows_exactly_what_it_imports_for_others(floor: str) -> None:
    package = importlib.import_module(floor)
    tree = ast.parse((ROOT / floor / "__init__.py").read_text(encoding="utf-8"))
    shown = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name for name in shown if not name.startswith("_")} - {"annotations"} == set(
        getattr(package, "__all__", ())
    )


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*LAYERS)
    }
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for path in python_files(*FLOORS, "benchmarks", "examples"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                if length > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}, "lines of the body, without the docstring"


def test_an_assert_calls_nothing_that_changes_anything() -> None:
    # With -O asserts are gone, and what they did with them.
    allowed = {"isinstance", "len", "any", "all", "count"}
    found = []
    for path in python_files(*FLOORS, "benchmarks", "examples"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)] if isinstance(node, ast.Assert) else []
            if {ast.unparse(call.func).rpartition(".")[2] for call in calls} - allowed:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_importing_a_floor_is_quick_and_takes_no_optional_package_along() -> None:
    script = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"  # of this process: others may keep the processors busy
        "import storage, rollout_data\n"
        "print(time.process_time() - start)\n"
        f"print(*[name for name in {OPTIONAL_MODULES!r} if name in sys.modules])\n"
    )
    runs = [subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout.splitlines()[1].split() == []
    assert min(float(run.stdout.splitlines()[0]) for run in runs) < MAX_IMPORT_S
