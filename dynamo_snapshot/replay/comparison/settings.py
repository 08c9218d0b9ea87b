"""The setting of a comparison, changed from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.sources import BUNDLED_FROM, Source
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.study import study

_NAMES = ("name",)
"""Fields that change no run: results go by the trace's name."""


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
        if name.strip() in _NAMES:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"--setting {name}: a setting is called after its trace",
                _known(values),
            )
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
        # msgspec names the field at the end, as a path: `$.engine.speed`.
        message, _, place = str(error).partition(" - at `$.")
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"--setting {place.rstrip('`') or ' '.join(changes)}: {message}",
            _known(msgspec.to_builtins(setting)),
        ) from error


def combinations(policy: str, knobs: Sequence[str]) -> list[str]:
    """Every combination of ``knobs`` such as ``miss_cost_s=1,10,100``, as specs of ``policy``.

    Raises:
        SnapshotError: ``configuration_invalid`` for one that cannot be read.
    """
    tried = []
    for knob in knobs:
        name, _, values = (piece.strip() for piece in knob.partition("="))
        if not name or not values:
            raise SnapshotError(Reason.CONFIGURATION_INVALID, f"--knob {knob}: no values", "Write NAME=VALUE,VALUE.")
        tried.append([f"{name}={value.strip()}" for value in values.split(",")])
    return [f"{policy}({','.join(chosen)})" for chosen in product(*tried)]


def field_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields that may be changed, nested ones with a dot."""
    names: list[str] = []
    for name, value in values.items():
        if prefix + name in _NAMES:
            continue
        names += field_names(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return names


def _unknown(name: str, values: dict[str, Any]) -> SnapshotError:
    return SnapshotError(Reason.CONFIGURATION_INVALID, f"--setting {name}: there is no such field", _known(values))


def _known(values: dict[str, Any]) -> str:
    return f"Write FIELD=VALUE; fields are {', '.join(field_names(values))}."
