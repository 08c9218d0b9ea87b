"""A NATS server that may send a user away."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path


class GuardedNats:
    """A nats-server that knows two users, of whom one may be shut out for as long as wanted."""

    def __init__(self, folder: Path, port: int) -> None:
        self._port, self.config = port, folder / "nats.conf"
        self.process: subprocess.Popen[bytes] | None = None
        self.let_in(True)

    def url(self, user: str) -> str:
        return f"nats://{user}:known@127.0.0.1:{self._port}"

    def let_in(self, first: bool) -> None:
        """Users who are not let in are sent away, too."""
        users = f"{{user: first, password: {'known' if first else 'another'}}}, {{user: second, password: known}}"
        self.config.write_text(f"listen: '127.0.0.1:{self._port}'\nauthorization {{ users: [ {users} ] }}\n")
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)
