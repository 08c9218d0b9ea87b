import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dynamo.common.snapshot import constants

from worker_hooks import control
from worker_hooks.control import ControlDirectory, Release, RestoreContext, WorkerState
from worker_hooks.reasons import HookError, HookReason


@pytest.fixture
def directory(tmp_path: Path) -> ControlDirectory:
    directory = ControlDirectory(tmp_path / "control")
    directory.prepare()
    return directory


def test_our_names_are_dynamos() -> None:
    assert constants.SNAPSHOT_CONTROL_DIR_ENV == control.LEGACY_CONTROL_DIR_ENV
    assert constants.READY_FOR_SNAPSHOT_FILE == control.READY_FOR_SNAPSHOT
    assert constants.SNAPSHOT_COMPLETE_FILE == control.SNAPSHOT_COMPLETE
    assert constants.RESTORE_COMPLETE_FILE == control.RESTORE_COMPLETE
    assert constants.SNAPSHOT_RESTORE_CONTEXT_FILE == control.RESTORE_CONTEXT


@pytest.mark.parametrize(
    ("environ", "state", "capture"),
    [
        ({}, None, None),
        ({"DYNAMO_SNAPSHOT_STATE_DIR": "/a"}, "/a", None),
        ({"SNAPSHOT_CONTROL_DIR": "/b"}, "/b", "/b"),
        ({"DYN_SNAPSHOT_CONTROL_DIR": "/c"}, "/c", "/c"),
        ({"SNAPSHOT_CONTROL_DIR": "/b", "DYN_SNAPSHOT_CONTROL_DIR": "/c"}, "/b", "/b"),
        ({"DYNAMO_SNAPSHOT_STATE_DIR": "/a", "SNAPSHOT_CONTROL_DIR": "/b"}, "/a", "/b"),
        ({"SNAPSHOT_CONTROL_DIR": ""}, None, None),
    ],
)
def test_which_variables_count(environ: dict[str, str], state: str | None, capture: str | None) -> None:
    found = control.control_directory(environ)
    assert (str(found.path) if found else None) == state
    assert control.capture_directory(environ) == capture


def test_preparing_removes_what_an_earlier_incarnation_left(directory: ControlDirectory) -> None:
    for name in ("ready-for-snapshot", "snapshot-complete", "restore-complete", "restore-context.json", "wake"):
        (directory.path / name).write_text("stale")
    (directory.path / "vllm-restore-ready").write_text("not ours")
    directory.prepare()
    assert [each.name for each in directory.path.iterdir()] == ["vllm-restore-ready"]
    assert directory.release() is None
    assert directory.woken() is None


@pytest.mark.parametrize(
    ("content", "incarnation"),
    [("incarnation=i-1\n", "i-1"), ("done", None), ("", None), ("pid=17\n", None), ("incarnation=i-2", "i-2")],
)
def test_any_restore_complete_counts(directory: ControlDirectory, content: str, incarnation: str | None) -> None:
    (directory.path / "restore-complete").write_text(content)
    assert directory.release() == Release(captured=False, incarnation=incarnation)


def test_snapshot_complete_comes_first(directory: ControlDirectory) -> None:
    (directory.path / "restore-complete").write_text("x")
    (directory.path / "snapshot-complete").write_text("")
    assert directory.release() == Release(captured=True)


@pytest.fixture
def no_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wakes within a test is inotify or a signal, not a re-check."""
    monkeypatch.setattr(control, "RECHECK_S", 60.0)


@pytest.mark.usefixtures("no_net")
async def test_the_wait_wakes_by_inotify(directory: ControlDirectory) -> None:
    waiting = asyncio.create_task(directory.wait_release())
    await asyncio.sleep(0.1)
    (directory.path / ".new").write_text("incarnation=a\n")
    (directory.path / ".new").rename(directory.path / "restore-complete")
    async with asyncio.timeout(20):
        assert await waiting == Release(captured=False, incarnation="a")


@pytest.mark.usefixtures("no_net")
async def test_a_parked_worker_wakes_by_inotify_and_by_its_own_file_only(directory: ControlDirectory) -> None:
    (directory.path / "restore-complete").write_text("incarnation=a\n")
    waiting = asyncio.create_task(directory.wait_woken())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    (directory.path / ".new").write_text("incarnation=a\n")
    (directory.path / ".new").rename(directory.path / "wake")
    async with asyncio.timeout(20):
        assert await waiting == Release(captured=False, incarnation="a")


def _put_another_in_its_place(directory: ControlDirectory) -> None:
    """What the watch of a restored worker may face: its path leads elsewhere than to what it watches."""
    directory.path.rename(directory.path.with_name("the-sources"))
    directory.path.mkdir()


@pytest.mark.usefixtures("no_net")
async def test_sigcont_makes_it_look_at_the_directory_that_is_there_now(directory: ControlDirectory) -> None:
    waiting = asyncio.create_task(directory.wait_release())
    await asyncio.sleep(0.1)
    _put_another_in_its_place(directory)
    (directory.path / "restore-complete").write_text("incarnation=clone\n")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    os.kill(os.getpid(), signal.SIGCONT)
    async with asyncio.timeout(20):
        assert await waiting == Release(captured=False, incarnation="clone")


async def test_without_a_signal_the_net_catches_it(
    directory: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "RECHECK_S", 0.2)
    waiting = asyncio.create_task(directory.wait_release())
    await asyncio.sleep(0.1)
    _put_another_in_its_place(directory)
    (directory.path / "restore-complete").write_text("incarnation=clone\n")
    async with asyncio.timeout(20):
        assert await waiting == Release(captured=False, incarnation="clone")


async def test_a_host_that_grants_no_watch_makes_the_wait_slow_not_impossible(
    directory: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(control, "DirectoryWatch", refused)
    monkeypatch.setattr(control, "RECHECK_S", 0.05)
    waiting = asyncio.create_task(directory.wait_release())
    await asyncio.sleep(0.1)
    (directory.path / "restore-complete").write_text("incarnation=clone\n")
    async with asyncio.timeout(20):
        assert await waiting == Release(captured=False, incarnation="clone")


def test_a_process_that_does_not_know_sigcont_ignores_it() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    sleeper.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
    sleeper.communicate(b"\n")
    assert sleeper.returncode == 0


def test_the_restore_context(directory: ControlDirectory) -> None:
    (directory.path / "restore-context.json").write_text(
        '{"env": {"A": "1", "B": null}, "incarnation": "i", "more": 1}'
    )
    assert directory.read_restore_context() == RestoreContext(env={"A": "1", "B": None}, incarnation="i")
    (directory.path / "restore-context.json").write_text('{"env": {}, "park": true}')
    assert directory.read_restore_context() == RestoreContext(env={}, park=True)


@pytest.mark.parametrize(
    ("content", "reason", "cause"),
    [
        (None, HookReason.RESTORE_CONTEXT_MISSING, "does not exist"),
        ("", HookReason.RESTORE_CONTEXT_CORRUPT, "cannot be read"),
        ('{"env": {"A"', HookReason.RESTORE_CONTEXT_CORRUPT, "cannot be read"),
        ("[]", HookReason.RESTORE_CONTEXT_CORRUPT, "expected an object, found list"),
        ("null", HookReason.RESTORE_CONTEXT_CORRUPT, "expected an object, found NoneType"),
        ("{}", HookReason.RESTORE_CONTEXT_CORRUPT, "under 'env'"),
        ('{"env": []}', HookReason.RESTORE_CONTEXT_CORRUPT, "under 'env'"),
        ('{"env": {"A": 1}}', HookReason.RESTORE_CONTEXT_CORRUPT, "env A: expected a string or null, found int"),
        ('{"env": {}, "incarnation": 3}', HookReason.RESTORE_CONTEXT_CORRUPT, "incarnation: expected a string"),
        ('{"env": {}, "park": "no"}', HookReason.RESTORE_CONTEXT_CORRUPT, "park: expected true or false, found str"),
    ],
)
def test_a_bad_restore_context_is_named(
    directory: ControlDirectory, content: str | None, reason: HookReason, cause: str
) -> None:
    if content is not None:
        (directory.path / "restore-context.json").write_text(content)
    with pytest.raises(HookError, match=cause) as failure:
        directory.read_restore_context()
    assert failure.value.reason is reason
    assert str(directory.path) in str(failure.value)


def test_the_state_file_is_whole_at_every_moment(directory: ControlDirectory) -> None:
    stop = threading.Event()
    broken: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                json.loads((directory.path / "worker-state.json").read_text())
            except FileNotFoundError:
                continue
            except ValueError as error:
                broken.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for length in range(400):
        directory.write_state(WorkerState("BOOTING", 1.0, None, 7, message="x" * (length * 37 % 5000)))
    stop.set()
    reader.join()
    assert not broken


def test_the_state_file_has_the_agreed_fields(directory: ControlDirectory) -> None:
    directory.write_state(WorkerState("REGISTERED", 2.0, "i", 7, self_test_at=1.5, history=(("BOOTING", 1.0),)))
    assert json.loads((directory.path / "worker-state.json").read_text()) == {
        "state": "REGISTERED",
        "since": 2.0,
        "incarnation": "i",
        "pid": 7,
        "reason": None,
        "message": "",
        "self_test_at": 1.5,
        "history": [["BOOTING", 1.0]],
        "evidence": {},
    }
