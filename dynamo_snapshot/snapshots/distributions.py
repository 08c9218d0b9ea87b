"""The Python that a command runs in, and what is installed there.

A distribution's RECORD lists every installed file with its digest, so the digest of RECORD stands for
all of them. An editable install has no such list; there the sources themselves are digested.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, Value

_ASK = "import json, platform, sys; print(json.dumps([platform.python_version(), [p for p in sys.path if p]]))"
_TIMEOUT_S = 30.0
_HEX_DIGITS = 16


class Interpreter(Value, frozen=True):
    """A Python and where it looks for modules; version and paths are empty where the command runs none."""

    version: str = ""
    path: tuple[str, ...] = ()


class _DirInfo(msgspec.Struct):
    editable: bool = False


class _DirectUrl(msgspec.Struct):
    url: str
    dir_info: _DirInfo = msgspec.field(default_factory=_DirInfo)


def interpreter_of(command: Sequence[str], environment: Mapping[str, str]) -> Interpreter:
    """Returns the Python that ``command`` starts: named itself, or by the script's first line.

    Raises:
        SnapshotError: ``configuration_invalid`` when the program is not there or its Python does not run.
    """
    which = partial(shutil.which, path=environment.get("PATH", os.environ.get("PATH", os.defpath)))
    program = which(command[0])
    if program is None:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"the worker's program {command[0]!r} is not there",
            "Correct the pool's worker.command, or install the program.",
        )
    # Behind a launcher such as numactl the Python is a later word.
    launched = [found for word in command[1:] if Path(word).name.startswith("python") and (found := which(word))]
    python = next(filter(None, map(_python_of, map(Path, [program, *launched]))), None)
    if python is None:
        return Interpreter()
    settings = tuple(sorted((name, value) for name, value in environment.items() if name.startswith("PYTHON")))
    return _ask(python, Path(python).stat().st_mtime_ns, settings)


def installed_distributions(path: Sequence[str]) -> dict[str, str]:
    """Returns name to version and digest of all on an interpreter's ``path``; of two alike the first counts."""
    found: dict[str, str] = {}
    for folder in map(Path, path):
        if not folder.is_dir():
            continue
        for entry in sorted(folder.iterdir()):
            if entry.suffix not in (".dist-info", ".egg-info"):
                continue
            name, _, version = entry.stem.partition("-")
            found.setdefault(name.replace("_", "-").lower(), f"{version} {_content(entry)}".strip())
    return dict(sorted(found.items()))


def _python_of(program: Path) -> str | None:
    # Not resolved: a venv's python is a link, and what is installed depends on the link's own place.
    if program.name.startswith("python"):
        return str(program)
    with program.open("rb") as file:
        first = file.readline(4096)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(words[-1]) or ""]
    return words[0] if words and Path(words[0]).name.startswith("python") else None


@lru_cache(maxsize=64)
def _ask(python: str, _changed_at: int, settings: tuple[tuple[str, str], ...]) -> Interpreter:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | dict(settings)
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        version, path = msgspec.json.decode(done.stdout, type=tuple[str, tuple[str, ...]])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID, f"{python}, which the worker's command names, does not run: {error}"
        ) from error
    return Interpreter(version=version, path=path)


def _content(info: Path) -> str:
    source = _editable_source(info)
    if source is not None:
        return f"editable:{_digest_sources(source)}"
    record = info / "RECORD"
    if not record.is_file():
        return ""
    status = record.stat()
    return _digest_record(record, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8192)
def _digest_record(record: Path, *_signature: int) -> str:
    return hashlib.sha256(record.read_bytes()).hexdigest()[:_HEX_DIGITS]


def _editable_source(info: Path) -> Path | None:
    try:
        direct = msgspec.json.decode((info / "direct_url.json").read_bytes(), type=_DirectUrl)
    except (OSError, msgspec.MsgspecError):
        return None
    return Path(unquote(urlparse(direct.url).path)) if direct.dir_info.editable else None


def _digest_sources(root: Path) -> str:
    """Digests the Python files of the packages right below ``root`` or ``root/src``."""
    digest = hashlib.sha256()
    packages = [init.parent for base in (root, root / "src") for init in sorted(base.glob("[!.]*/__init__.py"))]
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:_HEX_DIGITS]
