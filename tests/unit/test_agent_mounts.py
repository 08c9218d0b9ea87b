"""Mount points are read from the kernel's table as it writes them."""

from __future__ import annotations

from pathlib import Path

from dynamo_snapshot.agent.mounts import mount_points

TABLE = r"""
22 1 0:20 / /proc rw - proc proc rw
30 1 0:33 / /run/a rw - tmpfs tmpfs rw
31 1 0:34 / /run/a/b/house rw - tmpfs tmpfs rw
32 1 0:35 / /run/ab rw - tmpfs tmpfs rw
33 1 0:36 / /run/with\040blank/x rw - tmpfs tmpfs rw
34 1 0:37 / /run/a rw - tmpfs tmpfs rw
""".strip()


def test_the_innermost_come_first_and_neighbours_not_at_all() -> None:
    assert mount_points(Path("/run/a"), table=TABLE) == ["/run/a/b/house", "/run/a"]


def test_what_the_kernel_escapes_is_read_as_it_is() -> None:
    assert mount_points(Path("/run/with blank"), table=TABLE) == ["/run/with blank/x"]


def test_this_processs_own_table_has_its_proc() -> None:
    assert "/proc" in mount_points(Path("/proc"))
