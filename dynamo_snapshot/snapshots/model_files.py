"""What identifies a model's files, cheaply enough to ask before each order and soundly enough to trust.

A file in a Hugging Face cache is a link to a blob named by its content's digest: the name is taken.
Other files up to 16 MiB are digested in full. Of larger ``safetensors`` files the header (every tensor's
name, type, shape and place) and the first, middle and last 4 KiB of each tensor are digested; of other
large files 4 KiB at 256 places. Training, quantizing or merging changes values all over a tensor, so
it shows; a hand that edits a few bytes between the samples is not guarded against. Modification times
are left out: a copy of a model is the same model.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.compatibility import ModelFile
from dynamo_snapshot.snapshots.files import files_below

_WHOLE_BYTES = 16 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 256
_HEX_DIGITS = 32
_BLOB = re.compile(r"^[0-9a-f]{40}(?:[0-9a-f]{24})?$")


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def identify_model(path: Path) -> tuple[ModelFile, ...]:
    """Returns the identity of a model's folder, or of a model that is one file; hidden files do not count.

    Raises:
        SnapshotError: ``configuration_invalid`` when it is missing or cannot be read.
    """
    try:
        if path.is_file():
            return (_identify(path, path.name),)
        names = sorted(name for name in files_below(path) if not any(part.startswith(".") for part in name.split("/")))
        return tuple(_identify(path / name, name) for name in names)
    except OSError as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"model {path} cannot be read: {error.strerror}: {error.filename}",
            "Correct model.path, or put the model there.",
        ) from error


def _identify(path: Path, name: str) -> ModelFile:
    real = Path(os.path.realpath(path))
    status = real.stat()
    if real.parent.name == "blobs" and _BLOB.match(real.name):
        return ModelFile(path=name, size=status.st_size, digest=f"blob:{real.name[:_HEX_DIGITS]}")
    digest = _digest(real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return ModelFile(path=name, size=status.st_size, digest=digest)


@lru_cache(maxsize=8192)
def _digest(path: Path, size: int, *_signature: int) -> str:
    """Remembers each file's digest for as long as its inode, size and times stay."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            how = "sha256"
            digest.update(file.read())
        else:
            places = _tensor_places(file.read(8), file.fileno(), size) if path.suffix == ".safetensors" else None
            how = "sampled" if places is None else "tensors"
            for offset, length in places or _even_places(size):
                digest.update(os.pread(file.fileno(), length, offset))
    return f"{how}:{digest.hexdigest()[:_HEX_DIGITS]}"


def _even_places(size: int) -> Iterable[tuple[int, int]]:
    last = size - _SAMPLE_BYTES
    return [(last * number // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]


def _tensor_places(prefix: bytes, descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Returns the header and three places of each tensor, as offset and length; None where it is no such file."""
    (header_size,) = struct.unpack("<Q", prefix)
    if header_size > size - 8:
        return None
    try:
        header = msgspec.json.decode(os.pread(descriptor, header_size, 8), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(raw, type=_Tensor).data_offsets for raw in header.values()]
    except msgspec.MsgspecError:
        return None
    data = 8 + header_size
    places = [(0, data)]
    for begin, end in sorted(tensors):
        last = max(begin, end - _SAMPLE_BYTES)
        for start in sorted({begin, (begin + last) // 2, last}):
            places.append((data + start, min(_SAMPLE_BYTES, end - start)))
    return places
