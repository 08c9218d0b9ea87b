"""Can this host capture and restore? One finding a question: what was seen, and what to do about it.

A check looks and never changes anything. One that fails to look says so as a finding of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from dynamo_snapshot.agent.doctor import host_checks, software_checks
from dynamo_snapshot.agent.doctor.findings import Finding, Host, Severity, warning
from dynamo_snapshot.errors import SnapshotError

Check = Callable[[Host], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "root": host_checks.check_privileges,
    "kernel": host_checks.check_kernel,
    "namespaces": host_checks.check_namespaces,
    "tools": host_checks.check_tools,
    "pidfd": host_checks.check_pidfd,
    "criu": software_checks.check_criu,
    "pycriu": software_checks.check_pycriu,
    "seccomp": host_checks.check_seccomp,
    "io_uring": host_checks.check_io_uring,
    "userfaultfd": host_checks.check_userfaultfd,
    "huge pages": host_checks.check_huge_pages,
    "cgroups": host_checks.check_cgroups,
    "space": host_checks.check_space,
    "leftovers": host_checks.check_leftovers,
    "GPU": software_checks.check_gpus,
    "CUDA": software_checks.check_cuda,
    "etcd": software_checks.check_etcd,
    "nats-server": software_checks.check_nats_server,
    "dynamo": software_checks.check_dynamo,
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
