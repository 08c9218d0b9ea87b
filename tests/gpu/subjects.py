"""A CUDA process of a test's own, asked through files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

SUBJECT = Path(__file__).with_name("subject.py")


class Subject:
    """A CUDA process of the test's own."""

    def __init__(self, folder: Path, mib: int) -> None:
        folder.mkdir()
        self._folder, self._turn = folder, 0
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SUBJECT, folder, str(mib)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.tokens = self._answer()
        del self.tokens["pid"]

    def ask(self, question: str) -> dict[str, str]:
        self._turn += 1
        staged = self._folder / f"{self._turn}.asking"
        staged.write_text(question)
        staged.rename(self._folder / f"{self._turn}.ask")
        return self._answer()

    def send(self, question: str) -> None:
        """Asks without waiting."""
        self._turn += 1
        (self._folder / f"{self._turn}.asking").write_text(question)
        (self._folder / f"{self._turn}.asking").rename(self._folder / f"{self._turn}.ask")

    def answered(self) -> bool:
        return (self._folder / f"{self._turn}.answer").exists()

    def _answer(self) -> dict[str, str]:
        path = self._folder / f"{self._turn}.answer"
        deadline = time.monotonic() + 60
        while not path.exists():
            assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the subject does not answer"
            time.sleep(0.005)
        found: dict[str, str] = json.loads(path.read_text())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
