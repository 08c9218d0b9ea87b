"""install-criu against the real mirror, real CRIU and this kernel."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_snapshot.agent.criu import install as criu_install
from dynamo_snapshot.agent.criu.images import schema
from dynamo_snapshot.agent.criu.install import debian_mirror, install_criu, mirror_in
from dynamo_snapshot.agent.criu.probe import probe_criu
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

OLD = """#!/bin/sh
case $1 in --version) echo "Version: 3.17.1"; exit 0 ;; esac
while [ $# -gt 0 ]; do case $1 in -D) images=$2 ;; -o) log=$2 ;; esac; shift; done
echo "(00.001000) Error (criu/sockets.c:628): sockets: Can't get 1:16 opt: Operation not supported" > "$images/$log"
exit 1
"""


@pytest.fixture
def old_criu(tmp_path: Path) -> Path:
    """A criu that fails as Debian 13's does on Linux 6.16 and later."""
    path = tmp_path / "old" / "criu"
    path.parent.mkdir()
    path.write_text(OLD)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A criu unpacked from Debian's newest suite, whatever else is there."""
    return install_criu(tmp_path_factory.mktemp("install") / "criu", force=True)


def test_unpacked_criu_dumps_and_restores_here(installed: Path) -> None:
    probe = probe_criu(installed)
    assert (probe.works, probe.problem) == (True, "")
    assert [path.name for path in installed.parent.parent.iterdir()] == ["criu"], "something was left beside it"
    assert "python3-pycriu_" in (installed.parent / "packages.txt").read_text()


def test_its_folder_may_be_moved_and_linked_to(installed: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(installed.parent, moved, symlinks=True)
    link = tmp_path / "criu"
    link.symlink_to(moved / "criu")
    for command, folder in (([str(link)], tmp_path), (["./criu"], moved), (["sh", "criu"], moved)):
        done = subprocess.run([*command, "--version"], cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("Version: ")
    assert str(tmp_path) not in (moved / "criu").read_text()


def test_image_schema_comes_with_it(installed: Path) -> None:
    assert (installed.parent / "root/usr/lib/python3/dist-packages/pycriu/images/pagemap_pb2.py").is_file()
    assert schema("pagemap", installed).pagemap_entry


def test_second_run_installs_nothing(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_install, "debian_mirror", lambda: pytest.fail("asked for a mirror"))
    told: list[str] = []
    assert install_criu(installed.parent, tell=told.append) == installed
    assert "works" in told[0]


def test_working_criu_in_path_is_taken(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{installed.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    assert install_criu(tmp_path / "nothing") == installed
    assert not (tmp_path / "nothing").exists()


def test_old_criu_is_tried_and_replaced(old_criu: Path) -> None:
    probe = probe_criu(old_criu)
    assert (probe.version, probe.works) == ("3.17.1", False)
    assert "Operation not supported" in probe.problem
    told: list[str] = []
    new = install_criu(old_criu.parent, tell=told.append)
    assert new == old_criu
    assert "Operation not supported" in told[0]
    assert probe_criu(new).works


def test_unreachable_mirror_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_install, "debian_mirror", lambda: "http://127.0.0.1:1/debian")
    with pytest.raises(SnapshotError, match=r"127\.0\.0\.1:1") as caught:
        install_criu(tmp_path / "criu", force=True)
    assert caught.value.reason is Reason.SERVER_UNREACHABLE
    assert "--criu" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_unpacked_criu_that_does_not_work_is_not_put_in_place(
    old_criu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(mirror: str, suite: str, apt: Path, target: Path) -> None:
        target.mkdir(parents=True)
        shutil.copy(old_criu, target / "criu")

    monkeypatch.setattr(criu_install, "debian_mirror", lambda: "http://127.0.0.1:1/debian")
    monkeypatch.setattr(criu_install, "_unpack", unpack)
    with pytest.raises(SnapshotError, match=r"3\.17\.1 of Debian trixie does not work on Linux") as caught:
        install_criu(tmp_path / "criu", "trixie", force=True)
    assert caught.value.reason is Reason.CRIU_TOO_OLD
    assert not (tmp_path / "criu").exists()


def test_other_distribution_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "ubuntu", "PRETTY_NAME": "Ubuntu 24.04"})
    with pytest.raises(SnapshotError, match=r"Ubuntu 24\.04 is not Debian") as caught:
        install_criu(tmp_path / "criu", force=True)
    assert caught.value.reason is Reason.CRIU_MISSING
    assert "4.2 or newer" in caught.value.remedy


ONE_LINE = "deb [arch=amd64] http://mirror.invalid/debian/ {codename} main\n"
DEB822 = """# URIs: http://comment.invalid/debian
Types: deb deb-src
URIs: http://mirror.invalid/debian
Suites: {codename} {codename}-updates
Components: main
"""


@pytest.mark.parametrize(("name", "text"), [("sources.list", ONE_LINE), ("debian.sources", DEB822)])
def test_mirror_is_read_from_either_form_of_apts_configuration(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources.list.d"
    sources.mkdir()
    file = (sources if name.endswith(".sources") else tmp_path) / name
    file.write_text(text.format(codename=platform.freedesktop_os_release()["VERSION_CODENAME"]))
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list"; Dir::Etc::sourceparts "{sources}";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    assert debian_mirror() == "http://mirror.invalid/debian"


def test_security_updates_and_other_archives_are_no_mirror() -> None:
    listing = (
        "'http://a.invalid/debian-security/dists/bookworm-security/InRelease' a 0 \n"
        "'http://b.invalid/apt/dists/nodistro/InRelease' b 0 \n"
        "'http://c.invalid/debian/dists/bookworm/InRelease' c 0 \n"
    )
    assert mirror_in(listing, "bookworm") == "http://c.invalid/debian"
    assert mirror_in(listing.rpartition("'http://c")[0], "bookworm") is None
