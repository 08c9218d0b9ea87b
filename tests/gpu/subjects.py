"""A CUDA process of a test's own, asked through files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

SUBJECT = Path(__file__).with_name("subject.py")


class Conversation:
    """Questions to a ``subject.py`` that works in ``folder``, wherever it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._turn = 0

    @property
    def begun(self) -> bool:
        """Whether it has said what it holds."""
        return (self.folder / "0.answer").exists()

    def first(self) -> dict[str, str]:
        """What it said that it holds, at its start."""
        tokens = self._answer()
        del tokens["pid"]
        return tokens

    def ask(self, question: str) -> dict[str, str]:
        self._turn += 1
        staged = self.folder / f"{self._turn}.asking"
        staged.write_text(question)
        staged.rename(self.folder / f"{self._turn}.ask")
        return self._answer()

    def check(self) -> None:
        """Fails if the subject has ended."""

    def _answer(self) -> dict[str, str]:
        path = self.folder / f"{self._turn}.answer"
        deadline = time.monotonic() + 60
        while not path.exists():
            self.check()
            assert time.monotonic() < deadline, "the subject does not answer"
            time.sleep(0.005)
        found: dict[str, str] = json.loads(path.read_text())
        return found


class Subject(Conversation):
    """A CUDA process of the test's own, on the host."""

    def __init__(self, folder: Path, mib: int) -> None:
        super().__init__(folder)
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SUBJECT, folder, str(mib)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.tokens = self.first()

    def check(self) -> None:
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
