"""Log events have names, as others search for them; what varies is in their fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "dynamo_snapshot"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
NAME = re.compile(r"[a-z][a-z0-9_]*")


def events(source: str) -> list[tuple[int, str]]:
    """Line and first argument of each call of a structlog logger, which every module calls ``log``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "log"
        ):
            found.append((node.lineno, ast.literal_eval(node.args[0])))
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if "structlog" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_events_are_names(module: Path) -> None:
    assert [event for event in events(module.read_text(encoding="utf-8")) if not NAME.fullmatch(event[1])] == []


def test_the_modules_that_log_are_found() -> None:
    assert ROOT / "agent" / "service.py" in MODULES
    assert events('log.info("it is so", a=1)\nlog.info("so")') == [(1, "it is so"), (2, "so")]
