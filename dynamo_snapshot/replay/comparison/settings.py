"""The setting of a comparison, changed from a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
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
_RANGES: Mapping[str, tuple[float, float]] = {
    "engine.speed": (1e-6, 1e6),
    "engine.decode_speed": (1e-6, 1e6),
    "engine.max_batched_tokens": (1, 10**9),
    "engine.max_requests": (1, 10**9),
    "engine.kv_tokens": (1, 10**12),
    "min_replicas": (1, 10**4),
    "max_replicas": (1, 10**4),
    "initial_replicas": (1, 10**4),
    "ttft_objective_s": (1e-6, 1e7),
    "itl_objective_s": (1e-6, 1e7),
    "drain_limit_s": (0, 1e7),
}
"""Least and most. Far beyond what is real, and within what every policy can reckon with and JSON can write."""


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
    texts: dict[str, str] = {}
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
        if field not in place or isinstance(place[field], dict):
            raise _unknown(name, values)
        if not equals:
            raise SnapshotError(Reason.CONFIGURATION_INVALID, f"--setting {name}: no value", _known(values))
        texts[name.strip()] = place[field] = text.strip()
    fields = msgspec.to_builtins(setting)
    try:
        found = msgspec.convert(values, Setting, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        # msgspec names the field at the end, as a path: `$.engine.speed`.
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        said = f"expected {_expected(name)}, not {texts[name] or 'nothing'}" if name in texts else message
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID, f"--setting {name or ' '.join(changes)}: {said}", _known(fields)
        ) from error
    for name, text in texts.items():
        if name in _RANGES and not _RANGES[name][0] <= _value(found, name) <= _RANGES[name][1]:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"--setting {name}: expected {_expected(name)} from {_text(name, 0)} to {_text(name, 1)}, not {text}",
                _known(fields),
            )
    return found


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


def _expected(name: str) -> str:
    """What the value of a field is, in words."""
    kind: Any = Setting
    for piece in name.split("."):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == piece)
    if issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    return "a whole number" if kind is int else "a number"


def _value(setting: Setting, name: str) -> Any:
    found: Any = setting
    for piece in name.split("."):
        found = getattr(found, piece)
    return found


def _text(name: str, end: int) -> str:
    """The least or the most that a field takes, without an exponent where that can be read."""
    limit = _RANGES[name][end]
    return f"{limit:f}".rstrip("0").rstrip(".")


def _unknown(name: str, values: dict[str, Any]) -> SnapshotError:
    return SnapshotError(Reason.CONFIGURATION_INVALID, f"--setting {name}: there is no such field", _known(values))


def _known(values: dict[str, Any]) -> str:
    return f"Write FIELD=VALUE; fields are {', '.join(field_names(values))}."
