"""How a fleet's processes log: lines for people on a terminal, JSON otherwise."""

from __future__ import annotations

import sys

import structlog
from structlog.typing import Processor


def configure(part: str) -> None:
    """Sends structlog's events to standard error, each naming ``part`` of the fleet."""
    people = sys.stderr.isatty()
    last: Processor = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            last,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(part=part)
