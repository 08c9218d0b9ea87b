"""A CRIU new enough for this kernel, in a folder of its own; the host's packages and libc are not touched.

Debian's newest ``criu`` and ``python3-pycriu`` are unpacked with all they link to, and a wrapper runs
criu through that folder's own loader. apt does the resolving and checks the signatures, with an empty
package state so that it takes the whole closure, libc included; the mirror is the host's own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dynamo_snapshot.agent.criu.command import INSTALLED
from dynamo_snapshot.agent.criu.probe import probe_criu
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

NEWEST_SUITE = "sid"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT_S = 300.0

# Finds its own folder, so that the folder may be moved; asks readlink only where it was called by a link.
_WRAPPER = """\
#!/bin/sh
self=$0
[ ! -L "$self" ] || self=$(readlink -f "$self")
case $self in */*) here=${{self%/*}} ;; *) here=. ;; esac
unpacked=$here/root
library=$unpacked/{library}
exec "$library/{loader}" --library-path "$library" "$unpacked/{criu}" "$@"
"""

_BY_HAND = "Install CRIU 4.2 or newer by other means and name it with --criu, agent.criu or DYNAMO_SNAPSHOT_CRIU."


def default_folder() -> Path:
    """Where `install-criu` unpacks: inside this Python environment."""
    return (Path(sys.prefix) / INSTALLED).parent


def install_criu(
    folder: Path, suite: str = NEWEST_SUITE, *, force: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Path:
    """Returns a criu that dumps and restores a process with a socket here, unpacking one if none does.

    Args:
        folder: where to unpack; made, or replaced as a whole.
        suite: the Debian suite to take it from.
        force: unpack even where one works already.
        tell: called with each step, for people.

    Raises:
        SnapshotError: ``not_privileged``, ``server_unreachable`` (the mirror), ``criu_missing`` (no Debian,
            no such package), ``criu_too_old`` (unpacked, but it does not work on this kernel).
    """
    if os.geteuid() != 0:
        raise SnapshotError(Reason.NOT_PRIVILEGED, "CRIU needs root to be tried and run", "Run this as root.")
    wrapper = folder / "criu"
    candidates = [] if force else [wrapper, *filter(None, [_in_path()])]
    for candidate in candidates:
        if candidate.exists():
            probe = probe_criu(candidate)
            if probe.works:
                tell(f"criu {probe.version} works on Linux {platform.release()}: {candidate}")
                return candidate
            tell(f"{candidate} does not: {probe.problem}")
    mirror = debian_mirror()
    tell(f"unpacking criu of Debian {suite} into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that one rename puts it there.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        _unpack(mirror, suite, Path(scratch) / "apt", new)
        probe = probe_criu(new / "criu")
        if not probe.works:
            raise SnapshotError(
                Reason.CRIU_TOO_OLD,
                f"criu {probe.version or '(unknown)'} of Debian {suite} does not work on Linux {platform.release()}: "
                f"{probe.problem}",
                _BY_HAND,
            )
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
    tell(f"criu {probe.version} works on Linux {platform.release()}: {wrapper}")
    return wrapper


def debian_mirror() -> str:
    """Returns the base URL of the host's own Debian mirror, as apt itself understands its configuration."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    if release.get("ID") != "debian" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        name = release.get("PRETTY_NAME", platform.system())
        raise SnapshotError(
            Reason.CRIU_MISSING,
            f"no criu that works here was found, and {name} is not Debian, whose packages could be unpacked",
            _BY_HAND,
        )
    listing = _apt(["--print-uris", "update"], "apt's list of sources cannot be read")
    mirror = mirror_in(listing, release.get("VERSION_CODENAME", "sid"))
    if mirror is None:
        raise SnapshotError(
            Reason.CRIU_MISSING,
            "apt is configured without a Debian mirror",
            f"Add one below /etc/apt/sources.list.d. {_BY_HAND}",
        )
    return mirror


def mirror_in(print_uris: str, codename: str) -> str | None:
    """Returns the mirror that ``apt-get --print-uris update`` says it would ask for the release ``codename``."""
    names = {codename, "stable", "testing", "unstable", "sid"}
    for match in re.finditer(r"^'(\S+?)/dists/([^/'\s]+)/InRelease'", print_uris, re.MULTILINE):
        if match[2] in names:
            return match[1]
    return None


def _unpack(mirror: str, suite: str, apt: Path, target: Path) -> None:
    for path in (apt / "lists" / "partial", apt / "cache" / "archives" / "partial"):
        path.mkdir(parents=True)
    signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    (apt / "sources.list").write_text(f"deb {signed}{mirror} {suite} main\n")
    options = [
        f"Dir::Etc::sourcelist={apt / 'sources.list'}",
        "Dir::Etc::sourceparts=/dev/null",
        "Dir::Etc::preferencesparts=/dev/null",
        f"Dir::State::lists={apt / 'lists'}",
        "Dir::State::status=/dev/null",
        f"Dir::Cache={apt / 'cache'}",
        "APT::Sandbox::User=root",
        "Acquire::Retries=2",
    ]
    arguments = [argument for option in options for argument in ("-o", option)]
    archives = apt / "cache" / "archives"
    _apt([*arguments, "update"], f"the package list of Debian {suite} cannot be read from {mirror}")
    download = [*arguments, "-y", "--no-install-recommends", "--download-only", "install", "criu"]
    _apt(download, f"criu of Debian {suite} cannot be fetched from {mirror}")
    # Its files alone: its dependencies would be a whole Python, and it is used from ours.
    _apt([*arguments, "download", "python3-pycriu"], f"python3-pycriu of Debian {suite} cannot be fetched", archives)
    packages = sorted(archives.glob("*.deb"))
    (target / "root").mkdir(parents=True)
    for package in packages:
        done = subprocess.run(["dpkg-deb", "-x", package, target / "root"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SnapshotError(Reason.CRIU_MISSING, f"{package.name} cannot be unpacked: {done.stderr.strip()}")
    (target / "packages.txt").write_text("".join(f"{package.stem}\n" for package in packages))
    _write_wrapper(target)


def _write_wrapper(target: Path) -> None:
    root = target / "root"
    loader = next(iter(sorted(root.glob("usr/lib/*-linux-gnu*/ld-linux*.so.*"))), None)
    criu = next((path for path in ("usr/sbin/criu", "usr/bin/criu") if (root / path).is_file()), None)
    if loader is None or criu is None:
        raise SnapshotError(
            Reason.CRIU_MISSING, "Debian's packages hold no criu or no loader where they were expected", _BY_HAND
        )
    library = loader.parent.relative_to(root)
    wrapper = target / "criu"
    wrapper.write_text(_WRAPPER.format(library=library, loader=loader.name, criu=criu))
    wrapper.chmod(0o755)


def _in_path() -> Path | None:
    found = shutil.which("criu")
    return Path(found) if found else None


def _apt(arguments: list[str], failure: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            ["apt-get", "-q", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SnapshotError(Reason.SERVER_UNREACHABLE, f"{failure}: no answer within {_TIMEOUT_S:.0f} s") from error
    # `update` answers 0 where a mirror could not be reached and says so on a W: line.
    problems = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W: Failed"))]
    if done.returncode or problems:
        cause = problems[0] if problems else done.stderr.strip().rsplit("\n", 1)[-1] or f"status {done.returncode}"
        raise SnapshotError(
            Reason.SERVER_UNREACHABLE, f"{failure}: {cause}", f"Check the mirror and the network. {_BY_HAND}"
        )
    return done.stdout
