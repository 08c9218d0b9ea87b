"""The setting of a comparison, changed from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.sources import BUNDLED_FROM, Source
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.study import study


def setting_of(source: Source) -> Setting:
    """The setting of a trace: the study's own for its traces and for the bundled excerpt, else the default."""
    known = study(BUNDLED_FROM if source.path is None else source.name)
    return Setting(name=source.name) if known is None else known.setting


def changed(setting: Setting, changes: Sequence[str]) -> Setting:
    """Returns ``setting`` with ``changes`` such as ``max_replicas=8`` or ``engine.speed=2``.

    Raises:
        SnapshotError: ``configuration_invalid``, naming the field and what was expected.
    """
    values = msgspec.to_builtins(setting)
    for change in changes:
        name, equals, text = change.partition("=")
        *folders, field = name.strip().split(".")
        place = values
        for folder in folders:
            place = place.get(folder)
            if not isinstance(place, dict):
                raise _unknown(name, values)
        if not equals or field not in place or isinstance(place[field], dict):
            raise _unknown(name, values)
        place[field] = text.strip()
    try:
        return msgspec.convert(values, Setting, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"--setting {' '.join(changes)}: {error}",
            _known(msgspec.to_builtins(setting)),
        ) from error


def field_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields that may be changed, nested ones with a dot."""
    names: list[str] = []
    for name, value in values.items():
        names += field_names(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return names


def _unknown(name: str, values: dict[str, Any]) -> SnapshotError:
    return SnapshotError(Reason.CONFIGURATION_INVALID, f"--setting {name}: there is no such field", _known(values))


def _known(values: dict[str, Any]) -> str:
    return f"Write FIELD=VALUE; fields are {', '.join(field_names(values))}."
