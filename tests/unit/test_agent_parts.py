"""The agent's small pure parts: ports, CRIU's words, a worker's account, idle time, cgroups."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.control import ControlDirectory
from dynamo_snapshot.agent.criu import command as criu
from dynamo_snapshot.agent.idle import IdleShare
from dynamo_snapshot.agent.ports import Ports
from dynamo_snapshot.agent.replica import last_line, phase_of
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, ReplicaPhase, Way
from worker_hooks.control import WorkerState


def test_a_port_in_use_is_passed_over_and_a_freed_one_comes_last(free_port: Callable[[], int]) -> None:
    first = free_port()
    ports = Ports(first, first + 3)
    with socket.create_server(("127.0.0.1", first)):
        taken = [ports.take() for _ in range(3)]
        assert taken == [first + 1, first + 2, first + 3]
        with pytest.raises(SnapshotError) as refused:
            ports.take()
        assert refused.value.reason is Reason.PORT_IN_USE
        assert str(first) in refused.value.message
        ports.release(first + 1)
        ports.release(first + 3)
        assert ports.take() == first + 1
        assert ports.take() == first + 3


def test_a_port_that_a_found_worker_has_is_not_given_out(free_port: Callable[[], int]) -> None:
    first = free_port()
    ports = Ports(first, first)
    ports.hold(first)
    with pytest.raises(SnapshotError):
        ports.take()


CRIU_LOG = """\
(00.042380) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.050000) Warn  (criu/kerndat.c:1): something
(00.061000) Error (criu/proc_parse.c:502): Unknown shit 600 (anon_inode:[io_uring])
(00.062000) Error (criu/cr-dump.c:1): Collect mappings failed
"""


def test_the_first_error_that_matters_is_taken_from_a_log() -> None:
    assert criu.first_error(CRIU_LOG) == "Unknown shit 600 (anon_inode:[io_uring]) (proc_parse.c)"
    inside = "(00.094)    300: Error (criu/files-reg.c:2313): File dev/shm/x has bad mode 0100400 (expect 0100600)\n"
    assert criu.first_error(inside) == "File dev/shm/x has bad mode 0100400 (expect 0100600) (files-reg.c)"
    pie = "(00.1) pie: 300: Error (criu/pie/restorer.c:1): Can't restore 3 mapping\n"
    assert criu.first_error(pie) == "Can't restore 3 mapping (pie/restorer.c)"
    without_times = "     1: Error (criu/sk-unix.c:1602): unix: Can't bind: Address already in use"
    assert criu.first_error(without_times) == "unix: Can't bind: Address already in use (sk-unix.c)"
    assert criu.first_error(CRIU_LOG.splitlines()[0]) is None


def test_a_named_criu_is_never_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SnapshotError) as refused:
        criu.find(tmp_path / "absent")
    assert refused.value.reason is Reason.CRIU_MISSING
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\necho Version: 9.9\n")
    program.chmod(0o755)
    monkeypatch.setenv(criu.CRIU_ENV, str(program))
    assert criu.find(None) == program
    assert criu.version(program) == "9.9"
    monkeypatch.setenv(criu.CRIU_ENV, str(tmp_path / "gone"))
    with pytest.raises(SnapshotError, match=criu.CRIU_ENV):
        criu.find(None)


def test_a_criu_that_does_not_run_says_why(tmp_path: Path) -> None:
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\necho libnet.so.9: not found >&2\nexit 127\n")
    program.chmod(0o755)
    with pytest.raises(SnapshotError, match=r"libnet\.so\.9"):
        criu.version(program)


@pytest.mark.parametrize(
    ("way", "ready", "released", "state", "phase"),
    [
        (Way.COLD_START, False, False, None, ReplicaPhase.STARTING),
        (Way.COLD_START, False, False, "BOOTING", ReplicaPhase.STARTING),
        (Way.COLD_START, False, False, "ENGINE_READY", ReplicaPhase.STARTING),
        (Way.COLD_START, False, False, "READY_FOR_SNAPSHOT", ReplicaPhase.STARTING),
        (Way.COLD_START, False, False, "FAILED", ReplicaPhase.STARTING),
        (Way.COLD_START, False, False, "SELF_TESTING", ReplicaPhase.RESUMING),
        (Way.COLD_START, True, False, "READY_FOR_SNAPSHOT", ReplicaPhase.READY_FOR_SNAPSHOT),
        (Way.COLD_START, True, False, None, ReplicaPhase.READY_FOR_SNAPSHOT),
        (Way.COLD_START, True, True, "READY_FOR_SNAPSHOT", ReplicaPhase.RESUMING),
        (Way.COLD_START, True, True, "REGISTERED", ReplicaPhase.REGISTERED),
        (Way.RESTORE, False, False, None, ReplicaPhase.RESTORING),
        (Way.RESTORE, False, True, None, ReplicaPhase.RESUMING),
        (Way.RESTORE, False, True, "IDENTITY_APPLIED", ReplicaPhase.RESUMING),
        (Way.RESTORE, False, True, "REGISTERED", ReplicaPhase.REGISTERED),
        (Way.RESTORE, False, True, "DRAINING", ReplicaPhase.DRAINING),
        (Way.RESTORE, False, True, "STOPPED", ReplicaPhase.DRAINING),
    ],
)
def test_what_a_workers_account_means(
    way: Way, ready: bool, released: bool, state: str | None, phase: ReplicaPhase
) -> None:
    account = WorkerState(state=state, since=0.0) if state else None
    assert phase_of(way, ready, released, account) is phase


def test_the_last_line_of_a_log_that_says_anything(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert last_line(log) == ""
    log.write_text("x" * 5000 + "\nTraceback\nValueError: no weights\n\n  \n")
    assert last_line(log) == "ValueError: no weights"


def test_a_release_stands_in_two_files_and_the_context_comes_first(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path)
    control.refuse_if_released()
    control.release("life-1", {"A": "1", "B": None})
    assert (tmp_path / "restore-context.json").read_text() == '{"env":{"A":"1","B":null},"incarnation":"life-1"}'
    assert (tmp_path / "restore-complete").read_text() == "incarnation=life-1\n"
    context, complete = ((tmp_path / name).stat().st_mtime_ns for name in ("restore-context.json", "restore-complete"))
    assert context <= complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["restore-complete", "restore-context.json"]
    with pytest.raises(SnapshotError, match="before its restore"):
        control.refuse_if_released()


def test_a_workers_account_that_is_no_account_is_refused(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path)
    assert control.state() is None
    (tmp_path / "worker-state.json").write_text('{"state": 3}')
    with pytest.raises(SnapshotError, match=r"worker-state\.json"):
        control.state()


def test_idle_share_of_the_last_second(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    share = IdleShare(stat, clock=lambda: 0.0)
    assert share.share() is None
    for idle, busy in ((100, 100), (175, 125)):
        stat.write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
        share.sample()
    assert share.share() == 0.75


def test_without_a_writable_version_2_there_is_no_group(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path / "run", mount=Path("/proc/self"))
    assert groups.make("r", None) is None
    assert groups.find("r") is None
    assert groups.existing() == []


def test_groups_of_two_runtime_folders_do_not_meet(tmp_path: Path) -> None:
    one, two = (Cgroups(tmp_path / name, mount=tmp_path / "cgroup") for name in ("one", "two"))
    group = one.make("r", None)
    assert group is not None
    assert two.find("r") is None
    assert one.existing() == [group]
    one.remove(group)
    one.remove_base()
    assert list((tmp_path / "cgroup").iterdir()) == []
