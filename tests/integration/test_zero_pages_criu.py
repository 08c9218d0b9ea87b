"""Zero pages dropped from real CRIU images: what comes back is byte-identical."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_snapshot.agent.criu import zero_pages
from dynamo_snapshot.agent.criu.images import MM_MAGIC, PAGE, PAGEMAP_MAGIC, read_image, schema
from dynamo_snapshot.agent.criu.zero_pages import Droppable, ZeroPages, drop_zero_pages

SUBJECT = Path(__file__).parents[1] / "support" / "zero_page_subject.py"
NAMES = ("parent", "child")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


class Dump:
    """A dumped process tree, its images, and what it said of itself before."""

    def __init__(self, criu: Path, folder: Path) -> None:
        self.criu, self.folder = criu, folder
        self.images = folder / "images"
        self.images.mkdir()
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, SUBJECT, folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: all((folder / f"before-{name}").exists() for name in NAMES), "the subject")
        done = subprocess.run(self._command("dump", "-t", str(process.pid)), capture_output=True, check=False)
        assert done.returncode == 0, self._log("dump").read_text()[-3000:]
        process.wait()
        self.before = {name: json.loads((folder / f"before-{name}").read_text()) for name in NAMES}

    def after_restore(self) -> dict[str, dict[str, str]]:
        """Restores the tree and returns what it says of itself now.

        In a pid namespace of its own, where no zombie of the dumped tree holds a number.
        """
        house = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
        restored = subprocess.Popen([*house, *self._command("restore")], stderr=subprocess.DEVNULL)
        try:
            (self.folder / "go").touch()
            said = [self.folder / f"after-{name}" for name in NAMES]
            wait_for(lambda: all(path.exists() for path in said) or restored.poll() is not None, "the restored tree")
            assert restored.poll() is None, self._log("restore").read_text()[-3000:]
            return {name: json.loads(path.read_text()) for name, path in zip(NAMES, said, strict=True)}
        finally:
            restored.kill()
            restored.wait()

    def stored_file_pages(self) -> int:
        """Pages that the images store of the private file mapping, in both processes."""
        count = 0
        for path in self.images.glob("mm-*.img"):
            (mm,) = (schema("mm", self.criu).mm_entry.FromString(message) for message in read_image(path, MM_MAGIC))
            ranges = [(vma.start, vma.end) for vma in mm.vmas if vma.status & 1 << 6 and vma.prot & 2]
            messages = read_image(path.with_name(f"pagemap-{path.stem.removeprefix('mm-')}.img"), PAGEMAP_MAGIC)
            next(messages)
            for entry in map(schema("pagemap", self.criu).pagemap_entry.FromString, messages):
                covered = any(start <= entry.vaddr < end for start, end in ranges)
                count += entry.nr_pages if covered and entry.flags & 4 else 0
        return count

    def _log(self, action: str) -> Path:
        return self.images / f"{action}.log"

    def _command(self, action: str, *arguments: str) -> list[str | Path]:
        return [self.criu, action, "-D", self.images, "-o", f"{action}.log", "-v4", *arguments]


@pytest.fixture
def dump(criu: Path, tmp_path: Path) -> Dump:
    return Dump(criu, tmp_path)


def test_every_kind_of_memory_comes_back_as_it_was(dump: Dump, criu: Path) -> None:
    file_pages = dump.stored_file_pages()
    dropped = drop_zero_pages(dump.images, criu)
    assert dump.stored_file_pages() == file_pages
    # Private and shared memory lose 300 pages each; the child's own zeros are 255, its private zeros stay its parent's.
    assert dropped.bytes_before - dropped.bytes_after >= (300 + 300 + 255) * PAGE
    assert dump.after_restore() == dump.before
    assert dump.before["parent"]["inherited"] != dump.before["child"]["inherited"]


def test_a_second_pass_finds_nothing(dump: Dump, criu: Path) -> None:
    first = drop_zero_pages(dump.images, criu)
    second = drop_zero_pages(dump.images, criu)
    assert second == ZeroPages(first.bytes_after, first.bytes_after, first.entries_after, first.entries_after)


def test_dropping_pages_of_a_file_mapping_would_show(dump: Dump, criu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the digests above can tell: with the rule lifted, the file's bytes shine through."""
    everything = Droppable.of([(0, 1 << 62)])
    monkeypatch.setattr(zero_pages._Mappings, "droppable", lambda self, name: everything)
    drop_zero_pages(dump.images, criu)
    after = dump.after_restore()
    assert after["parent"]["file"] != dump.before["parent"]["file"]
    assert after["parent"]["private"] == dump.before["parent"]["private"]
