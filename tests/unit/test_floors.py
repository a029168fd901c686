"""The floors of the package: who may import whom, who may touch files, and how light the entry point is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_persist
from sglang_persist import errors

PACKAGE = Path(sglang_persist.__file__).parent
FILES = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}

#: From the ground up. A module imports from floors below its own, and from its own only within one folder.
FLOORS = (
    ("errors.py", "log.py", "bounded.py", "workers.py", "spare.py"),
    ("config.py",),
    ("model.py",),
    ("nodes.py",),
    ("format/limits.py", "format/planes.py"),
    ("format/codec.py",),
    ("format/envelope.py",),
    ("format/segment.py", "format/manifest.py", "format/weights.py"),
    ("fs.py",),
    ("plan/tree.py",),
    ("plan/paths.py", "plan/breakeven.py"),
    ("plan/saving.py", "plan/loading.py", "plan/rewriting.py"),
    ("plan/agreement.py", "plan/fitting.py", "plan/union.py"),
    ("plan/topology.py",),
    ("store/names.py",),
    ("store/shard.py", "store/weights_cache.py"),
    ("store/attempts.py", "store/root.py", "store/writer.py", "store/prune.py", "store/verify.py", "store/report.py"),
    ("store/sources.py",),
    ("store/home.py",),
    ("keeper.py",),
    ("ports.py",),
    ("save.py", "background.py"),
    ("filling.py",),
    ("inserting.py",),
    ("restore.py",),
    ("engine/",),
)
#: They stand beside the building.
EDGES = {
    "__init__.py": {"config.py"},
    "client.py": {"errors.py"},
    "cli.py": {"__init__.py", "config.py", "client.py", "errors.py", "fs.py", "store/"},
    "__main__.py": {"cli.py"},
    "plugin.py": {"config.py", "errors.py", "log.py", "engine/"},
}
HEAVY = {"sglang", "torch", "psutil", "setproctitle"}


def floor(name: str) -> int | None:
    for level, names in enumerate(FLOORS):
        if any(name == n or (n.endswith("/") and name.startswith(n)) for n in names):
            return level
    return None


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of everything that is imported, at the top or inside functions."""
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            out |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return out


def own(tree: ast.AST) -> set[str]:
    """Files of this package that are imported; a package by its __init__.py only where that holds something."""
    out = set()
    for name in imports(tree):
        if name.split(".")[0] == "sglang_persist":
            stem = "/".join(name.split(".")[1:])
            if f"{stem}.py" in FILES:
                out.add(f"{stem}.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "sglang_persist":
            out |= {"__init__.py" for a in node.names if f"{a.name}.py" not in FILES and a.name not in FOLDERS}
    return out


FOLDERS = {p.name for p in PACKAGE.iterdir() if p.is_dir()}


def test_every_module_has_its_floor():
    empty = {f"{folder}/__init__.py" for folder in ("engine", "format", "plan", "store")}
    assert {n for n in FILES if floor(n) is None} - empty - set(EDGES) == set()
    for name in empty:
        assert not imports(FILES[name]), f"{name} imports nothing"
    listed = {n for names in FLOORS for n in names if not n.endswith("/")} | set(EDGES)
    assert listed <= set(FILES), "and every name on the list exists"


def test_imports_go_downward_only():
    for name, tree in FILES.items():
        for other in own(tree):
            if name in EDGES:
                allowed = EDGES[name]
                assert other in allowed or any(a.endswith("/") and other.startswith(a) for a in allowed), (name, other)
            elif floor(name) is not None:
                same_folder = name.rpartition("/")[0] == other.rpartition("/")[0] != ""
                assert floor(other) is not None, f"{name} imports {other}"
                below = floor(other) < floor(name) or (floor(other) == floor(name) and same_folder)
                assert below, f"{name} imports {other}"


def test_within_a_floor_nobody_imports_in_a_circle():
    graph = {name: own(tree) for name, tree in FILES.items() if name not in EDGES}
    while graph:
        leaves = {n for n, used in graph.items() if not used & set(graph)}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {n: used for n, used in graph.items() if n not in leaves}


def test_only_the_engine_and_the_entry_point_know_the_engine():
    heavy = {n for n, tree in FILES.items() if {i.split(".")[0] for i in imports(tree)} & HEAVY}
    assert {n for n in heavy if not n.startswith("engine/")} == {"plugin.py"}
    assert any(n.startswith("engine/") for n in heavy)


def test_the_command_line_never_imports_the_engine():
    seen, todo = set(), ["cli.py", "__main__.py", "client.py", "config.py"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += own(FILES[name])
    assert not [n for n in seen if n.startswith("engine/") or n in ("plugin.py", "save.py", "restore.py")]


# ------------------------------------------------------------------------------------------------------ effects

#: Attributes that change, open or lock files, whatever they are attributes of ...
EFFECTS = re.compile(
    r"write_text|write_bytes|read_text|read_bytes|touch|unlink|rmdir|mkdir|makedirs|symlink_to|hardlink_to|chmod|lchmod|"
    r"fchmod|fsync|fdatasync|truncate|ftruncate|flock|lockf|mkfifo|rmtree|copyfile|copytree|pread|pwrite|sendfile|utime"
)
#: ... and those that do so on these modules only.
OF_MODULES = {
    "os": re.compile(r"open|fdopen|rename|replace|remove|removedirs|write|read|close|link|symlink|chown|stat|lstat|"
                     r"fstat|listdir|scandir|walk|statvfs|access|sync|dup2?|pipe|mknod"),
    "io": re.compile(r"open|FileIO"), "shutil": re.compile(r".*"), "tempfile": re.compile(r".*"),
    "fcntl": re.compile(r".*"), "mmap": re.compile(r".*"), "glob": re.compile(r".*"), "sqlite3": re.compile(r".*"),
}  # fmt: skip
#: Someone else's file, once, before there is a store: the settings.
ALLOWED = {("config.py", "read_bytes")}


def effects(tree: ast.AST) -> set[str]:
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            of_module = OF_MODULES.get(module)
            if EFFECTS.fullmatch(node.attr) or (of_module and of_module.fullmatch(node.attr)):
                out.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            out.add("open()")
        elif isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            out |= {a.name for a in node.names}
    return out


def test_only_the_file_system_touches_files():
    found = {(n, e) for n, tree in FILES.items() if n != "fs.py" for e in effects(tree)}
    assert found == ALLOWED
    assert {"open", "fsync", "rename", "unlink", "mkdir", "flock"} <= effects(FILES["fs.py"])


def test_nothing_stored_is_ever_executed():
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "runpy", "imp"}
    for name, tree in FILES.items():
        assert not {i.split(".")[0] for i in imports(tree)} & forbidden, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"{name}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                # Both unpickle: np.load when it is asked to, torch.load by its nature.
                assert node.func.attr not in ("fromfile", "memmap", "allow_pickle"), f"{name}:{node.lineno}"
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                assert (owner, node.func.attr) not in (("np", "load"), ("torch", "load")), f"{name}:{node.lineno}"


# -------------------------------------------------------------------------------------------------------- weight


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", ["sglang_persist", "sglang_persist.plugin", "sglang_persist.config"])
def test_what_every_process_of_the_engine_imports_is_light(module):
    loaded = modules_after(f"import {module}")
    assert "sglang_persist" in loaded
    assert not loaded & {"numpy", "torch", "sglang", "zstandard", "msgpack", "xxhash", "click", "rich", *HEAVY}


def test_the_store_works_without_the_engine():
    loaded = modules_after("import sglang_persist.cli, sglang_persist.save, sglang_persist.restore")
    assert "numpy" in loaded
    assert not loaded & HEAVY


# --------------------------------------------------------------------------------------------------------- errors


def leaves(kind: type) -> set[type]:
    below = {leaf for child in kind.__subclasses__() for leaf in leaves(child)}
    return below or {kind}


def documented() -> dict[str, int]:
    """Exit codes by class, as the docstring's tree lists them; a line without one has its parent's."""
    codes, stack = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"( +)([A-Z]\w+)\b(?:.*exit (\d+))?", line)
        if match and hasattr(errors, match[2]):
            stack = stack[: (len(match[1]) - 2) // 2]
            code = int(match[3]) if match[3] else (stack[-1] if stack else None)
            stack.append(code)
            codes[match[2]] = code
    return codes


def test_every_error_has_the_exit_code_that_is_documented():
    codes = documented()
    found = {e.__name__: e.exit_code for e in leaves(errors.PersistError)}
    assert {name: codes[name] for name in found} == found
    assert len(found) > 12
    damaged = {e.__name__ for e in leaves(errors.FormatError)}
    others = [code for name, code in found.items() if name not in damaged]
    assert len(set(others)) == len(others), "one code, one meaning"
    assert {found[name] for name in damaged} == {6}
    assert 6 not in others
    assert not {0, 1} & set(found.values()), "0 is success, 1 are findings"


def test_no_error_of_ours_is_caught_by_a_handler_for_something_else():
    kinds = [getattr(errors, n) for n in documented()]
    assert all(kind.__mro__[-3:] == (Exception, BaseException, object) for kind in kinds)
    assert not any(issubclass(kind, (OSError, ValueError, RuntimeError, LookupError)) for kind in kinds)
