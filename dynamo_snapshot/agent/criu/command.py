"""CRIU, by its command line, inside a replica's house.

The command line and not the RPC: CRIU must run inside the house's pid and mount namespaces, which for a
service process would mean one service per house; its log names the culprit where the RPC answers only
``errno``; its exit status is the verdict; and a process group can be killed when a phase's time is up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_snapshot.agent.house import LOG_INSIDE, House
from dynamo_snapshot.agent.process import spawn
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks import holder
from worker_hooks.guard import LARGEST_GHOST_BYTES

CRIU_ENV = "DYNAMO_SNAPSHOT_CRIU"
INSTALLED = Path("share", "dynamo-snapshot", "criu", "criu")
"""Below ``sys.prefix``: where `dynamo-snapshot install-criu` puts one."""

_COMMON = ("--manage-cgroups=ignore", "--ext-unix-sk", "--file-locks", "--link-remap")
_WARNINGS = "-v2"
"""Of a restore: a line a mapping and thread costs a large process tenths of a second."""
_LOG_DESCRIPTOR = 9
_WITH_LOG = f'exec {_LOG_DESCRIPTOR}>>"$1" || exit; shift; exec "$@"'
# Without CAP_SYS_RESOURCE in the first user namespace CRIU says this always, and goes on.
_HARMLESS = "RLIMIT_NOFILE"
_ERROR = re.compile(r"^(?:\(\d+\.\d+\) )?(?:pie: )?\s*(?:\d+: )?Error \((?:criu/)?(?P<where>[^)]+)\): (?P<what>.*)$")


def find(configured: Path | None) -> Path:
    """Returns the criu to run: the configured one, else the environment's, the installed one, PATH's.

    Raises:
        SnapshotError: ``criu_missing``; a path that was named is never replaced by another.
    """
    named = configured or (Path(os.environ[CRIU_ENV]) if os.environ.get(CRIU_ENV) else None)
    if named is not None:
        if not os.access(named, os.X_OK):
            raise SnapshotError(
                Reason.CRIU_MISSING,
                f"{named} is not an executable file",
                f"Correct agent.criu in fleet.yaml, --criu or {CRIU_ENV}.",
            )
        return named
    installed = Path(sys.prefix) / INSTALLED
    if os.access(installed, os.X_OK):
        return installed
    if on_path := shutil.which("criu"):
        return Path(on_path)
    raise SnapshotError(
        Reason.CRIU_MISSING,
        f"no criu: neither {installed} nor one in PATH",
        f"Run `dynamo-snapshot install-criu`, or name one with {CRIU_ENV}.",
    )


def version(criu: Path) -> str:
    """Returns CRIU's version, such as ``4.2.1``; raises ``criu_missing`` if it does not run. Blocks for a moment."""
    try:
        output = subprocess.run([criu, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SnapshotError(Reason.CRIU_MISSING, f"{criu} does not run: {error}") from error
    if match := re.search(r"Version: (\S+)", output.stdout):
        return match[1]
    text = (output.stderr or output.stdout).strip()[-200:]
    raise SnapshotError(Reason.CRIU_MISSING, f"{criu} --version says nothing usable: {text}")


@dataclass(frozen=True)
class Criu:
    """One criu program. Cancelling a call kills CRIU with everything it started."""

    path: Path
    version: str

    @classmethod
    def locate(cls, configured: Path | None) -> Criu:
        path = find(configured)
        return cls(path, version(path))

    async def dump(self, house: House, pid: int, images: Path) -> None:
        """Writes the images of the worker ``pid`` (inside ``house``) and lets it run on.

        Raises:
            SnapshotError: ``criu_dump_failed`` or ``disk_full`` with CRIU's first error line.
        """
        log = house.path / holder.LOGS / "criu-dump.log"
        command = [
            str(self.path), "dump", "--tree", str(pid), "-v4", "--leave-running",
            "--ghost-limit", str(LARGEST_GHOST_BYTES),
            *_files(images, log), *_COMMON,
        ]  # fmt: skip
        status, text = await _run(house.command(*command), house)
        if status != 0:
            what = _explain(log, status, text)
            full = "No space left" in _read(log) or _is_full(images)
            reason = Reason.DISK_FULL if full else Reason.CRIU_DUMP_FAILED
            raise SnapshotError(reason, f"criu dump failed: {what}", _remedy(full, what))

    async def restore(self, house: House, images: Path, log_path: str) -> None:
        """Restores ``images`` into ``house``, with the worker's log going to the house's own.

        Args:
            log_path: the log as the image names it.

        Raises:
            SnapshotError: ``criu_restore_failed`` with CRIU's first error line.
        """
        log = house.path / holder.LOGS / "criu-restore.log"
        # The log is opened by the shell inside the house: a file opened outside could not be captured again.
        command = [
            "sh", "-c", _WITH_LOG, "sh", LOG_INSIDE,
            str(self.path), "restore", _WARNINGS, "--restore-detached",
            "--inherit-fd", f"fd[{_LOG_DESCRIPTOR}]:{log_path.lstrip('/')}",
            *_files(images, log), *_COMMON,
        ]  # fmt: skip
        status, text = await _run(house.command(*command), house)
        if status != 0:
            what = _explain(log, status, text)
            raise SnapshotError(Reason.CRIU_RESTORE_FAILED, f"criu restore failed: {what}")


def first_error(log: str) -> str | None:
    """The first line of a CRIU log that tells why it failed, without time stamp and line number."""
    for line in log.splitlines():
        if (match := _ERROR.match(line)) and _HARMLESS not in match["what"]:
            return f"{match['what'].strip()} ({match['where'].split(':')[0]})"
    return None


def _files(images: Path, log: Path) -> tuple[str, ...]:
    # A work folder of its own: nothing but images may be written where images lie.
    return ("--images-dir", str(images), "--work-dir", str(log.parent), "--log-file", log.name)


async def _run(command: Sequence[str], house: House) -> tuple[int, str]:
    """Returns exit status and the end of what was written to standard error."""
    with tempfile.TemporaryFile() as errors:
        process = spawn(command, environment=house.environment(), stderr=errors.fileno())
        try:
            status = await process.wait()
        except BaseException:
            await process.kill()
            raise
        errors.seek(0)
        return status, errors.read().decode(errors="replace").strip()[-500:]


def _read(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _explain(log: Path, status: int, stderr: str) -> str:
    cause = first_error(_read(log)) or stderr or "it gave no reason"
    return cause if status > 0 else f"{cause} (ended by signal {-status})"


def _is_full(folder: Path) -> bool:
    """CRIU does not always say that it failed for want of space."""
    return shutil.disk_usage(folder).free < 1 << 20


def _remedy(full: bool, what: str) -> str:
    if full:
        return "Free space in agent.store_dir, or remove snapshots with `dynamo-snapshot snapshots rm`."
    if "io_uring" in what:
        return "Start the worker through `dynamo-snapshot-worker run --`: it blocks io_uring before the engine starts."
    if "tcp" in what.lower():
        return "The worker has a connection to somewhere: it must be made after restore-complete."
    return "The whole log is in the replica's logs folder while the replica lives."
