"""The doctor's questions, asked of made-up hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import pytest

from dynamo_snapshot.agent.doctor import host_checks as doctor_host
from dynamo_snapshot.agent.doctor import software_checks as doctor_software
from dynamo_snapshot.agent.doctor.examine import can_restore, examine
from dynamo_snapshot.agent.doctor.findings import Finding, Host, Severity, error, ok, warning
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for name in ("proc", "sys"):
        (tmp_path / name).mkdir()
    return Host(
        store_dir=tmp_path / "store" / "snapshots",
        runtime_dir=tmp_path / "run",
        minimum_free_bytes=0,
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
    )


def put(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def only(findings: Iterable[Finding]) -> Finding:
    [found] = findings
    return found


def test_check_that_fails_is_a_finding_and_the_others_are_still_made(host: Host) -> None:
    def breaks(_: Host) -> Iterable[Finding]:
        raise ZeroDivisionError("boom")

    def refuses(_: Host) -> Iterable[Finding]:
        raise SnapshotError(Reason.CRIU_MISSING, "no criu", "get one")

    def fine(_: Host) -> Iterable[Finding]:
        yield ok("fine", "seen")

    found = list(examine(host, {"breaks": breaks, "refuses": refuses, "fine": fine}))
    assert [(finding.check, finding.severity) for finding in found] == [
        ("breaks", Severity.WARNING),
        ("refuses", Severity.WARNING),
        ("fine", Severity.OK),
    ]
    assert "ZeroDivisionError: boom" in found[0].seen
    assert found[1].remedy == "get one"


def test_only_an_error_keeps_a_host_from_restoring() -> None:
    assert can_restore([ok("a", ""), warning("b", "", "")])
    assert not can_restore([ok("a", ""), error("b", "", "")])


@pytest.mark.parametrize(
    ("user", "capabilities", "severity"),
    [
        (0, "000001ffffffffff", Severity.OK),
        (0, "000001fffeffffff", Severity.OK),
        (0, "00000000a80425fb", Severity.ERROR),
        (1000, "0000000000000000", Severity.ERROR),
    ],
)
def test_root_needs_its_capabilities(
    user: int, capabilities: str, severity: Severity, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    put(host.proc, "self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert only(doctor_host.check_privileges(host)).severity is severity


def test_kernel_needs_checkpoint_restore(host: Host) -> None:
    assert only(doctor_host.check_kernel(host)).severity is Severity.ERROR
    put(host.proc, "sys/kernel/ns_last_pid", "1")
    (host.proc / "self" / "map_files").mkdir(parents=True)
    assert only(doctor_host.check_kernel(host)).severity is Severity.OK


def test_missing_namespaces_are_named(host: Host) -> None:
    put(host.proc, "self/ns/pid")
    found = only(doctor_host.check_namespaces(host))
    assert found.severity is Severity.ERROR
    assert "mnt" in found.seen
    assert "pid," not in found.seen


def test_missing_tools_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nsenter" in only(doctor_host.check_tools(host)).seen


@pytest.mark.parametrize(("setting", "words"), [("0", "on; the guard"), ("2", "off"), (None, "no such setting")])
def test_io_uring_setting_is_told(setting: str | None, words: str, host: Host) -> None:
    if setting:
        put(host.proc, "sys/kernel/io_uring_disabled", setting + "\n")
    assert words in only(doctor_host.check_io_uring(host)).seen


def test_huge_pages_that_slow_restores_come_with_advice(host: Host) -> None:
    put(host.sys, "kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    assert "third of the time" in only(doctor_host.check_huge_pages(host)).remedy
    put(host.sys, "kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
    assert only(doctor_host.check_huge_pages(host)).remedy == ""


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (doctor_host.check_userfaultfd, "sys/vm/unprivileged_userfaultfd", "0"),
        (doctor_host.check_seccomp, "sys/kernel/seccomp/actions_avail", "kill_process errno allow"),
    ],
)
def test_kernel_features_that_only_some_need(
    check: Callable[[Host], Iterable[Finding]], path: str, text: str, host: Host
) -> None:
    assert only(check(host)).severity is Severity.WARNING
    put(host.proc, path, text)
    assert only(check(host)).severity is Severity.OK


def test_cgroups_are_version_2_with_a_memory_controller(host: Host, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    mount.mkdir()
    assert "no writable cgroup version 2" in only(doctor_host.check_cgroups(host)).seen
    put(host.proc, "mounts", f"cgroup /x/memory cgroup rw 0 0\ncgroup2 {mount} cgroup2 rw,relatime 0 0\n")
    assert "no memory controller" in only(doctor_host.check_cgroups(host)).seen
    put(mount, "cgroup.controllers", "cpu memory pids")
    assert only(doctor_host.check_cgroups(host)).severity is Severity.OK


def test_space_that_has_to_stay_free(host: Host) -> None:
    assert only(doctor_host.check_space(host)).severity is Severity.OK
    short = Host(store_dir=host.store_dir, runtime_dir=host.runtime_dir, minimum_free_bytes=1 << 62)
    found = only(doctor_host.check_space(short))
    assert found.severity is Severity.ERROR
    assert "minimum_free_bytes" in found.remedy
    assert not host.store_dir.exists()


def test_old_gpu_driver_is_a_warning(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    put(host.proc, "cpuinfo", "flags : fpu\n")
    assert "CPU engines only" in only(doctor_software.check_gpus(host)).seen
    put(host.proc, "driver/nvidia/gpus/0/information", "Model: NVIDIA T4\n")
    put(host.proc, "driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu\n")
    found = only(doctor_software.check_gpus(host))
    assert (found.severity, found.seen) == (Severity.WARNING, "NVIDIA T4; driver 535.154.05")


def test_the_cuda_check_asks_the_driver_where_there_is_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    put(host.proc, "cpuinfo", "flags : fpu\n")
    assert "no NVIDIA driver" in only(doctor_software.check_cuda(host)).seen
    put(host.proc, "driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Thu\n")
    fake = doctor_software._INVENTORY.replace("cuda.bindings", "cuda.fake")
    monkeypatch.setattr(doctor_software, "_INVENTORY", fake)
    found = only(doctor_software.check_cuda(host))
    assert found.severity is Severity.OK
    assert "GPU-00000000-0000-0000-0000-000000000001: 138 GiB free of 139 GiB" in found.seen
    monkeypatch.setattr(doctor_software, "_INVENTORY", "raise SystemExit('no library')")
    found = only(doctor_software.check_cuda(host))
    assert found.severity is Severity.WARNING
    assert "no library" in found.seen


def test_servers_are_run_to_see_their_version(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert only(doctor_software.check_etcd(host)).severity is Severity.WARNING
    server = tmp_path / "etcd"
    server.write_text("#!/bin/sh\necho etcd Version: 3.5.1\n")
    server.chmod(0o755)
    assert "3.5.1" in only(doctor_software.check_etcd(host)).seen
    server.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    assert "does not run: broken" in only(doctor_software.check_etcd(host)).seen


@pytest.mark.parametrize(
    ("problem", "seen", "remedy"),
    [
        (PermissionError(13, "Permission denied"), "may not be run by user", "as root"),
        (OSError(8, "Exec format error"), "does not run: Exec format error", "anew"),
        (subprocess.TimeoutExpired("etcd", 60), "did not answer in 60 s", "by hand"),
    ],
)
def test_a_server_that_cannot_be_run_is_a_sentence_with_its_remedy(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, seen: str, remedy: str
) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise problem

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(doctor_software, "find_program", lambda name: tmp_path / name)
    found = only(doctor_software.check_etcd(host))
    assert found.severity is Severity.WARNING
    assert seen in found.seen
    assert remedy in found.remedy


def test_what_a_user_may_not_look_at_is_no_fault_to_report(host: Host) -> None:
    def locked(_: Host) -> Iterable[Finding]:
        raise PermissionError(13, "Permission denied", "/secret")

    found = only(examine(host, {"locked": locked}))
    assert "may not look at /secret" in found.seen
    assert found.remedy == "Run the doctor as root."


def test_dynamo_that_does_not_import_is_a_warning_with_the_last_line(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback ...\nModuleNotFoundError: No module named 'sklearn'\n")

    monkeypatch.setattr(subprocess, "run", fails)
    found = only(doctor_software.check_dynamo(host))
    assert (found.severity, found.seen.endswith("No module named 'sklearn'")) == (Severity.WARNING, True)
