"""Can this host capture and restore? One finding a question: what was seen, and what to do about it.

A check looks and never changes anything. One that fails to look says so as a finding of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from dynamo_snapshot.agent import doctor_host, doctor_software
from dynamo_snapshot.agent.findings import Finding, Host, Severity, warning
from dynamo_snapshot.errors import SnapshotError

Check = Callable[[Host], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "root": doctor_host.check_privileges,
    "kernel": doctor_host.check_kernel,
    "namespaces": doctor_host.check_namespaces,
    "tools": doctor_host.check_tools,
    "pidfd": doctor_host.check_pidfd,
    "criu": doctor_software.check_criu,
    "pycriu": doctor_software.check_pycriu,
    "seccomp": doctor_host.check_seccomp,
    "io_uring": doctor_host.check_io_uring,
    "userfaultfd": doctor_host.check_userfaultfd,
    "huge pages": doctor_host.check_huge_pages,
    "cgroups": doctor_host.check_cgroups,
    "space": doctor_host.check_space,
    "leftovers": doctor_host.check_leftovers,
    "GPU": doctor_software.check_gpus,
    "CUDA": doctor_software.check_cuda,
    "etcd": doctor_software.check_etcd,
    "nats-server": doctor_software.check_nats_server,
    "dynamo": doctor_software.check_dynamo,
}


def examine(host: Host, checks: Mapping[str, Check] = CHECKS) -> Iterator[Finding]:
    """Yields each check's findings as they come; one that fails yields a warning with what stopped it."""
    for name, check in checks.items():
        try:
            yield from check(host)
        except SnapshotError as problem:
            yield warning(name, problem.message, problem.remedy)
        except PermissionError as problem:
            where = f" {problem.filename}" if problem.filename else ""
            yield warning(name, f"user {os.geteuid()} may not look at{where}", "Run the doctor as root.")
        except Exception as problem:  # whatever it is, the other findings are still wanted
            yield warning(name, f"could not be looked at: {type(problem).__name__}: {problem}", "Please report this.")


def can_restore(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.ERROR for finding in findings)
