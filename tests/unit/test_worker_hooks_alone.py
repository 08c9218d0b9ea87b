"""The hooks stand alone: nothing but the standard library at import, and a wheel without dependencies."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "worker_hooks"
MODULES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)

ISOLATED = """
import sys
sys.path.insert(0, sys.argv[1])
assert not any("site-packages" in path for path in sys.path), sys.path
import importlib
importlib.import_module(sys.argv[2])
loaded = {name.partition(".")[0] for name in sys.modules}
foreign = loaded - set(sys.stdlib_module_names) - {"worker_hooks", "__main__"}
assert not foreign, foreign
"""


def _isolated(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", ISOLATED, str(folder), module]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_with_the_standard_library_alone(module: str) -> None:
    done = _isolated(REPOSITORY, module)
    assert done.returncode == 0, done.stderr


def test_the_list_of_modules_is_not_empty() -> None:
    assert {"worker_hooks", "worker_hooks.control", "worker_hooks.engines.mocker"} <= set(MODULES)


def test_the_holder_does_not_load_what_a_worker_needs() -> None:
    code = "import sys, worker_hooks.holder; print('asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=30)
    assert done.stdout == "False\n", done.stderr


def test_serve_is_there_whatever_was_imported_before() -> None:
    code = "import worker_hooks.serving, worker_hooks.engines.module, worker_hooks; print(callable(worker_hooks.serve))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=30)
    assert done.stdout == "True\n", done.stderr


def test_the_wheel_builds_and_runs_without_anything_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("dynamo_snapshot_worker_hooks-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        assert "Requires-Dist" not in archive.read(metadata).decode()
        archive.extractall(tmp_path / "site")
    packed = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site" / "worker_hooks").rglob("*.py")}
    assert packed == {path.relative_to(REPOSITORY) for path in PACKAGE.rglob("*.py")}
    for module in MODULES:
        done = _isolated(tmp_path / "site", module)
        assert done.returncode == 0, done.stderr
