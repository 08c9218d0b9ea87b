"""A process tree with zero pages in every kind of memory: it says what it holds, waits, and says it again.

Run as ``python zero_page_subject.py FOLDER``. ``FOLDER/before`` is written once all is in place and
``FOLDER/after`` once ``FOLDER/go`` appears; both map a memory's name to the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import time
from pathlib import Path

PAGE = 4096
PAGES = 512
SIZE = PAGES * PAGE


def write(path: Path, content: dict[str, str]) -> None:
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(content))
    staged.rename(path)


def fill(memory: mmap.mmap) -> None:
    """Every page is touched; in the middle lies a long run of zeros, and near the end a short one."""
    for page in range(PAGES):
        zero = 100 <= page < 400 or 450 <= page < 453
        memory[page * PAGE : (page + 1) * PAGE] = bytes(PAGE) if zero else bytes([page % 255 + 1]) * PAGE


def main(folder: Path) -> None:
    private = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memfd = os.memfd_create("subject")
    os.ftruncate(memfd, SIZE)
    named = mmap.mmap(memfd, SIZE)
    backing = folder / "backing"
    backing.write_bytes(b"\xff" * SIZE)
    with backing.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    inherited = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    inherited[:] = b"\xaa" * SIZE
    for memory in (private, shared, named, mapped):
        fill(memory)
    memories = {"private": private, "shared": shared, "memfd": named, "file": mapped, "inherited": inherited}

    child = os.fork()
    if not child:
        # The child's pages are zero where its parent's are not.
        inherited[PAGE : SIZE // 2] = bytes(SIZE // 2 - PAGE)
    name = "parent" if child else "child"

    def digests() -> dict[str, str]:
        return {key: hashlib.sha256(memory[:]).hexdigest() for key, memory in memories.items()}

    write(folder / f"before-{name}", digests())
    while not (folder / "go").exists():
        time.sleep(0.01)
    write(folder / f"after-{name}", digests())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
