"""Names of other packages that the hooks rely on: there, or refused by name before anything starts."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

from worker_hooks.reasons import HookError, HookReason


def require(module: str, names: Iterable[str]) -> ModuleType:
    """Imports ``module`` and returns it if it has all ``names`` (dots reach into classes).

    Raises:
        HookError: ``symbols_missing``, naming each one.
    """
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise HookError(HookReason.SYMBOLS_MISSING, f"{module} cannot be imported: {error}") from error
    missing = [f"{module}.{name}" for name in names if not _has(imported, name)]
    if missing:
        raise HookError(HookReason.SYMBOLS_MISSING, f"missing: {', '.join(missing)}")
    return imported


def _has(thing: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True
