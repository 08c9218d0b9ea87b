"""The log of the last worker of each pool that failed: it would go with its house."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog

log = structlog.get_logger()


class FailedLogs:
    """``failed-POOL.log`` in ``folder``, which is made when the first one fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, pool: str, worker_log: Path) -> Path | None:
        """Keeps ``worker_log``, to which its worker may still write; returns where, or None if it cannot be kept."""
        kept = self._folder / f"failed-{pool}.log"
        temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            try:
                os.link(worker_log, temporary)  # whatever its size, in no time
            except OSError:  # on another file system
                shutil.copyfile(worker_log, temporary)
            temporary.replace(kept)
        except OSError as error:
            log.warning("failed_log_not_kept", pool=pool, log=str(worker_log), cause=str(error))
            return None
        return kept
