"""A worker frozen in its wait, restored where another directory lies at the same path, the source living on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.worker_house import PYTHON, Street, release, wait_for

WAITER = """
import asyncio, sys, time
from pathlib import Path
import worker_hooks.control
from worker_hooks.control import ControlDirectory

worker_hooks.control.RECHECK_S = 300  # only inotify can wake it

async def main():
    control = ControlDirectory(Path(sys.argv[1]))
    control.prepare()
    control.write_ready()
    release = await control.wait_release()
    (control.path / "woken").write_text(f"{time.time()} {release.incarnation}")
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    street = Street(tmp_path)
    yield street
    street.close()


def _woken(control: Path) -> tuple[float, str]:
    at, incarnation = wait_for(
        lambda: (control / "woken").exists() and (control / "woken").read_text(), "wake-up"
    ).split()
    return float(at), incarnation


def test_each_clone_wakes_at_once_on_its_own_directory(street: Street, criu: Path, tmp_path: Path) -> None:
    source = street.house("source")
    source.start([PYTHON, "-c", WAITER, str(street.control)], {})
    wait_for((source.control / "ready-for-snapshot").exists, "ready-for-snapshot")
    source.dump(criu, tmp_path / "images")
    clones = [street.house("first"), street.house("second")]
    for clone in clones:
        clone.restore(criu, tmp_path / "images")
    for house, name in ((clones[0], "one"), (clones[1], "two"), (source, "three")):
        written = release(house.control, name, {})
        at, incarnation = _woken(house.control)
        assert incarnation == name
        assert at - written < 1
    assert sum((house.control / "woken").exists() for house in (*clones, source)) == 3
