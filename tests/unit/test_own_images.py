"""What two restores of one snapshot cannot share, each has of its own; all else is linked."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_snapshot.agent.criu.own_images import FILES, own_images
from dynamo_snapshot.agent.house import House
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

BEFORE = b"\x12\x1f\0cuda-uvmfd-4026532281-15\0\x18\x01 cuda-uvmfd-4026532281-15 \0cuda-uvmfd-4026532281-16\0"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / FILES).write_bytes(BEFORE)
    (folder / "pages-1.img").write_bytes(b"pages")
    return folder


@pytest.mark.parametrize(
    ("namespace", "number"), [(4026532999, b"4026532999"), (77, b"0000000077"), (94026532999, b"4026532999")]
)
def test_the_driver_s_sockets_get_the_new_namespace_s_name(
    shared: Path, tmp_path: Path, namespace: int, number: bytes
) -> None:
    made = own_images(shared, tmp_path / "own", namespace)
    assert (made / FILES).read_bytes() == (
        b"\x12\x1f\0cuda-uvmfd-" + number + b"-15\0\x18\x01 cuda-uvmfd-4026532281-15 \0cuda-uvmfd-" + number + b"-16\0"
    )
    assert (made / "pages-1.img").readlink() == shared / "pages-1.img"
    assert (shared / FILES).read_bytes() == BEFORE


def test_without_such_a_socket_all_is_shared(shared: Path, tmp_path: Path) -> None:
    (shared / FILES).write_bytes(b"no socket")
    assert own_images(shared, tmp_path / "own", 1) == shared
    assert not (tmp_path / "own").exists()


def _ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


async def test_a_house_that_has_ended_meanwhile_is_called_that(shared: Path, tmp_path: Path) -> None:
    holder: Any = SimpleNamespace(pid=_ended())
    with pytest.raises(SnapshotError, match="has ended") as error:
        await House(tmp_path / "house", holder).images(shared)
    assert error.value.reason is Reason.HOLDER_FAILED
