"""The doctor's questions to kernel and machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dynamo_snapshot.agent.direct_folder import MARK, abandoned
from dynamo_snapshot.agent.doctor.findings import Finding, Host, error, ok, warning
from dynamo_snapshot.agent.entry import LOCK
from dynamo_snapshot.snapshots.locks import is_held

_TIMEOUT_S = 20.0
_MIB = 1 << 20

# Linux capability numbers (capabilities(7)).
_CAPABILITIES = {"net_admin": 12, "sys_ptrace": 19, "sys_admin": 21, "sys_resource": 24, "checkpoint_restore": 40}
_INDISPENSABLE = ("sys_ptrace", "sys_admin")
_NAMESPACES = ("pid", "mnt", "net", "ipc", "uts", "time")
_TOOLS = ("unshare", "nsenter", "mount", "umount", "sh")

_RUN_AS_ROOT = (
    "Run as root; in a container, privileged with the host's pid namespace or CAP_SYS_ADMIN and CAP_SYS_PTRACE."
)


def check_privileges(host: Host) -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield error("root", f"this runs as user {os.geteuid()}; CRIU, namespaces and mounts need root", _RUN_AS_ROOT)
        return
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", (host.proc / "self/status").read_text(), re.MULTILINE)
    held = int(match[1], 16) if match else 0
    lacking = [name for name, number in _CAPABILITIES.items() if not held >> number & 1]
    if any(name in lacking for name in _INDISPENSABLE):
        yield error("root", f"root without the capabilities {', '.join(lacking)}", _RUN_AS_ROOT)
    elif lacking:
        yield ok("root", f"root; without {', '.join(lacking)}, which is seldom needed")
    else:
        yield ok("root", "root with all capabilities that are needed")


def check_kernel(host: Host) -> Iterator[Finding]:
    release = platform.release()
    if (host.proc / "sys/kernel/ns_last_pid").exists() and (host.proc / "self/map_files").is_dir():
        yield ok("kernel", f"Linux {release} with CHECKPOINT_RESTORE")
    else:
        yield error(
            "kernel",
            f"Linux {release} was built without CONFIG_CHECKPOINT_RESTORE",
            "Boot a kernel that has it; Debian's, Ubuntu's and Red Hat's do.",
        )


def check_namespaces(host: Host) -> Iterator[Finding]:
    lacking = [name for name in _NAMESPACES if not (host.proc / "self/ns" / name).exists()]
    if lacking:
        yield error("namespaces", f"the kernel has no {', '.join(lacking)} namespace", "Boot a kernel that has them.")
        return
    command = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        yield error("namespaces", f"a pid and mount namespace cannot be made: {done.stderr.strip()}", _RUN_AS_ROOT)
    else:
        yield ok("namespaces", "pid and mount namespaces can be made")


def check_tools(_: Host) -> Iterator[Finding]:
    lacking = [tool for tool in _TOOLS if not shutil.which(tool)]
    if lacking:
        yield error("tools", f"{', '.join(lacking)} not in PATH", "Install the package util-linux (and mount).")
    else:
        yield ok("tools", ", ".join(_TOOLS))


def check_pidfd(host: Host) -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as problem:
        yield error("pidfd", f"pidfd_open: {problem.strerror}", "Linux 5.3 or newer is needed.")
    else:
        yield ok("pidfd", "exits are seen at once")


def check_userfaultfd(host: Host) -> Iterator[Finding]:
    if (host.proc / "sys/vm/unprivileged_userfaultfd").exists():
        yield ok("userfaultfd", "there: CRIU can restore memory lazily")
    else:
        yield warning("userfaultfd", "the kernel has none: CRIU cannot restore memory lazily", "Nothing else needs it.")


def check_seccomp(host: Host) -> Iterator[Finding]:
    actions = _read(host.proc / "sys/kernel/seccomp/actions_avail").split()
    if "errno" in actions:
        yield ok("seccomp", "filters work: the guard can block io_uring in workers")
    else:
        yield warning(
            "seccomp",
            "the kernel has no seccomp filters: the guard cannot block io_uring in workers",
            "Set kernel.io_uring_disabled=2 with sysctl, as CRIU cannot dump a ring.",
        )


def check_io_uring(host: Host) -> Iterator[Finding]:
    setting = _read(host.proc / "sys/kernel/io_uring_disabled") or "absent"
    meaning = {
        "0": "on; the guard blocks it inside workers, as CRIU cannot dump a ring",
        "1": "off for unprivileged processes",
        "2": "off",
    }
    yield ok(
        "io_uring", f"kernel.io_uring_disabled={setting}: {meaning.get(setting, 'the kernel has no such setting')}"
    )


def check_huge_pages(host: Host) -> Iterator[Finding]:
    text = _read(host.sys / "kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text)
    setting = match[1] if match else "absent"
    faster = "With `always`, CRIU restores large anonymous memory in about a third of the time."
    yield ok("huge pages", f"transparent_hugepage/enabled is {setting}", "" if setting == "always" else faster)


def check_cgroups(host: Host) -> Iterator[Finding]:
    # Version 2 is what the agent uses, where version 1 lies beside it, too.
    match = re.search(r"^\S+ (\S+) cgroup2 ", _read(host.proc / "mounts"), re.MULTILINE)
    root = Path(match[1]) if match else None
    if root is None or not os.access(root, os.W_OK) or _read_only(root):
        yield warning(
            "cgroups",
            "no writable cgroup version 2: replicas get no group and no memory limit",
            "Mount one writable (in a container: a private cgroup namespace, or privileged).",
        )
    elif "memory" not in _read(root / "cgroup.controllers").split():
        yield warning(
            "cgroups",
            f"{root} has no memory controller: a replica's memory_limit_bytes cannot be enforced",
            "Boot with systemd.unified_cgroup_hierarchy=1, so that version 2 has all controllers.",
        )
    else:
        yield ok("cgroups", f"{root} with its memory controller: replicas can have limits of their own")


def check_space(host: Host) -> Iterator[Finding]:
    folder = _existing(host.store_dir)
    usage = shutil.disk_usage(folder)
    seen = f"{usage.free // _MIB} MiB free for {host.store_dir}"
    if usage.free < host.minimum_free_bytes:
        yield error(
            "space",
            f"{seen}, and {host.minimum_free_bytes // _MIB} MiB are to stay free",
            "Free space, name another agent.store_dir, or lower agent.minimum_free_bytes.",
        )
    else:
        yield ok("space", seen)
    for name, path in (("runtime folder", host.runtime_dir), ("store", host.store_dir)):
        there = _existing(path)
        if not os.access(there, os.W_OK) or _read_only(there):
            yield error(name, f"{there} cannot be written to", f"Make {path} writable, or name another folder.")


def check_leftovers(host: Host) -> Iterator[Finding]:
    """Whether replicas live here that no agent or command looks after."""
    found = False
    for folder in abandoned(host.direct_dir):
        found = True
        pid = _read(folder / MARK)
        seen = (
            f"process {pid}, a `capture` or `restore`, was killed and left {_replicas(folder) or 'files'} in {folder}"
        )
        yield warning("leftovers", seen, "The next `dynamo-snapshot capture` or `restore` removes it.")
    if _replicas(host.runtime_dir) and not is_held(host.runtime_dir / LOCK):
        found = True
        seen = f"{_replicas(host.runtime_dir)} in {host.runtime_dir}, and no agent runs there"
        yield warning("leftovers", seen, "An agent that is started there adopts them; `up` removes them first.")
    if not found:
        yield ok("leftovers", "no replica without an agent")


def _replicas(runtime_dir: Path) -> str:
    """Their number, for a sentence; empty where there is none."""
    count = len(list((runtime_dir / "replicas").glob("*")))
    return f"{count} replica{'' if count == 1 else 's'}" if count else ""


def _existing(path: Path) -> Path:
    return next(candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists())


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
