"""CRIU's image files, read and written through CRIU's own protobuf schema.

An image is ``MAGIC MAGIC {SIZE MESSAGE}``, all integers 32 bits little-endian
(https://criu.org/Images). The schema's generated modules come with pycriu and import each other by
bare names, so they are loaded with their folder on ``sys.path`` only for that moment: pycriu's own
way leaves it there, and pulls in every image kind and its RPC client.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

COMMON_MAGIC = 0x54564319
"""First word of every image since CRIU 1.1; the second names its kind."""
PAGEMAP_MAGIC = 0x56084025
MM_MAGIC = 0x57492820
PAGE = 4096

_SIZE = struct.Struct("<I")
_MAGIC = struct.Struct("<II")
_DISTRIBUTION = Path("/usr/lib/python3/dist-packages")
_import_lock = threading.Lock()


def schema(name: str, criu: Path | None = None) -> ModuleType:
    """Returns the schema module ``<name>_pb2`` ("pagemap", "mm", …).

    Args:
        name: the image kind.
        criu: the criu that is used; the pycriu unpacked beside it is preferred to an installed one.

    Raises:
        SnapshotError: ``criu_missing`` when no pycriu is found.
    """
    module = f"{name}_pb2"
    with _import_lock:
        if module in sys.modules:
            return sys.modules[module]
        folder = _schema_folder(criu)
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(module)
        finally:
            sys.path.remove(str(folder))


def read_image(path: Path, magic: int) -> Iterator[bytes]:
    """Yields the encoded messages of the image at ``path``.

    Raises:
        SnapshotError: ``snapshot_corrupt`` when it is not an image of that kind or ends within a message.
    """
    data = path.read_bytes()
    if len(data) < _MAGIC.size or _MAGIC.unpack_from(data) != (COMMON_MAGIC, magic):
        raise _corrupt(path, "it does not begin as an image of its kind does")
    at = _MAGIC.size
    while at < len(data):
        if at + _SIZE.size > len(data):
            raise _corrupt(path, f"it ends within the size at byte {at}")
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            raise _corrupt(path, f"it ends within the message at byte {at}")
        yield data[at : at + size]
        at += size


def write_image(path: Path, magic: int, messages: Iterable[Any]) -> None:
    """Writes ``messages`` (protobuf messages) as an image to ``path``."""
    parts = [_MAGIC.pack(COMMON_MAGIC, magic)]
    for message in messages:
        encoded = message.SerializeToString()
        parts += (_SIZE.pack(len(encoded)), encoded)
    path.write_bytes(b"".join(parts))


def _schema_folder(criu: Path | None) -> Path:
    candidates = []
    if criu is not None:
        candidates.append(criu.resolve().parent / "root" / _DISTRIBUTION.relative_to("/"))
    installed = importlib.util.find_spec("pycriu")
    if installed is not None and installed.submodule_search_locations:
        candidates.append(Path(next(iter(installed.submodule_search_locations))).parent)
    candidates.append(_DISTRIBUTION)
    for candidate in candidates:
        folder = candidate / "pycriu" / "images"
        if (folder / "pagemap_pb2.py").exists():
            return folder
    raise SnapshotError(
        Reason.CRIU_MISSING,
        f"pycriu, which describes CRIU's images, is in none of {', '.join(map(str, candidates))}",
        "Run `dynamo-snapshot install-criu`, or install the package python3-pycriu.",
    )


def _corrupt(path: Path, why: str) -> SnapshotError:
    return SnapshotError(Reason.SNAPSHOT_CORRUPT, f"CRIU image {path} cannot be read: {why}")
