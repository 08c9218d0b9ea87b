"""Every policy by name, with its knobs and the settings that a fair comparison tries.

``build("knative-kpa(target=8)", setting)`` gives one to run. A knob that is a load of one replica also takes
``0.5c``: half of the requests with which a replica of this setting still keeps its objective, so that one spec
means the same to a fast and a slow engine. Every autoscaler has ``min_replicas`` besides, as its original has.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from dynamo_snapshot.replay.policies import snapshot
from dynamo_snapshot.replay.policies.clairvoyant import Clairvoyant, ClairvoyantKnobs
from dynamo_snapshot.replay.policies.dynamo import Dynamo, DynamoLoadKnobs, DynamoThroughputKnobs
from dynamo_snapshot.replay.policies.engine_facts import EngineFacts, Traffic
from dynamo_snapshot.replay.policies.hpa import Hpa, HpaGpu, HpaGpuKnobs, HpaKnobs
from dynamo_snapshot.replay.policies.keda import Keda, KedaKnobs
from dynamo_snapshot.replay.policies.knative import KnativeKpa, KpaKnobs
from dynamo_snapshot.replay.policies.knobs import RELATIVE, Load
from dynamo_snapshot.replay.policies.llm_d import LlmD, LlmDKnobs
from dynamo_snapshot.replay.policies.ray_serve import RayServe, RayServeKnobs
from dynamo_snapshot.replay.policies.spec import Relative, invalid, parse, value
from dynamo_snapshot.replay.policies.static import Static, StaticKnobs
from dynamo_snapshot.replay.policies.sweeps import SWEEPS
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Policy

Values = dict[str, Any]
_FLOOR = "min_replicas"


@dataclass(frozen=True)
class _Knob:
    kind: type
    default: object
    load: Load | None = None


@dataclass(frozen=True)
class _Place:
    """Where a policy is to run."""

    setting: Setting
    facts: EngineFacts
    name: str
    floor: int

    @property
    def bounds(self) -> tuple[int, int]:
        return max(self.floor, self.setting.min_replicas), self.setting.max_replicas


@dataclass(frozen=True)
class _Entry:
    knobs: Mapping[str, _Knob]
    make: Callable[[Values, _Place], Policy]
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Where a default depends on the setting."""
    first: str | None = None
    """The knob that needs no name."""


def names() -> tuple[str, ...]:
    """All policies: ours, the rivals, and the ceiling."""
    return tuple(_ENTRIES)


def knobs(name: str) -> dict[str, str]:
    """The knobs of a policy with their defaults, as a spec writes them.

    Raises:
        SnapshotError: ``configuration_invalid`` for an unknown name.
    """
    entry = _entry(name)
    return {knob: entry.defaults.get(knob, _text(known.default)) for knob, known in entry.knobs.items()}


def build(spec: str, setting: Setting, traffic: Traffic | None = None) -> Policy:
    """Returns a fresh policy for one run.

    Args:
        spec: ``name`` or ``name(knob=value, …)``.
        setting: engine, bounds and objectives.
        traffic: what requests are like, for loads relative to an engine's capacity; as a load test tells;
            those of the Azure code trace if None.

    Raises:
        SnapshotError: ``configuration_invalid``, naming what is unknown or wrong and what is known.
    """
    read = parse(spec)
    entry = _entry(read.name)
    given = dict(read.values)
    if read.first is not None:
        if entry.first is None or entry.first in given:
            raise invalid(f"policy {read.name}: {read.first} has no knob to go to", _known(read.name))
        given[entry.first] = read.first
    unknown = next((knob for knob in given if knob not in entry.knobs), None)
    if unknown is not None:
        raise invalid(f"policy {read.name} has no knob {unknown}{_nearest(unknown, entry.knobs)}", _known(read.name))
    facts = EngineFacts.of(setting, traffic or Traffic())
    try:
        values: Values = {
            knob: _absolute(knob, entry.knobs[knob], text, facts) for knob, text in {**entry.defaults, **given}.items()
        }
        floor = values.pop(_FLOOR, 1)
        if not 1 <= floor <= setting.max_replicas:
            raise ValueError(f"{_FLOOR} must be from 1 to the setting's {setting.max_replicas}")
        return entry.make(values, _Place(setting, facts, _canonical(read.name, entry, given), floor))
    except ValueError as error:
        raise invalid(f"policy {read.name}: {error}", _known(read.name)) from error


def sweep(name: str) -> list[str]:
    """The specs that a fair comparison tries for a policy, its defaults first.

    Raises:
        SnapshotError: ``configuration_invalid`` for an unknown name.
    """
    _entry(name)
    return [name if not settings else f"{name}({settings})" for settings in ("", *SWEEPS.get(name, ()))]


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        raise invalid(f"no policy is named {name}{_nearest(name, _ENTRIES)}", f"Known are {', '.join(_ENTRIES)}.")
    return _ENTRIES[name]


def _absolute(knob: str, known: _Knob, text: str, facts: EngineFacts) -> object:
    try:
        read = value(text, known.kind)
    except ValueError as error:
        raise ValueError(f"{knob}: {error}") from error
    if isinstance(read, float) and not math.isfinite(read):
        raise ValueError(f"{knob}: expected a finite number, not {text}")
    if not isinstance(read, Relative):
        return read
    if known.load is None:
        raise ValueError(f"{knob}: expected a number, not {text}: it is no load of a replica")
    return read.share * (facts.capacity if known.load is Load.REQUESTS else facts.kv_percent)


def _canonical(name: str, entry: _Entry, given: Mapping[str, str]) -> str:
    settings = []
    for knob, known in entry.knobs.items():
        text = given.get(knob)
        if text is None or text == entry.defaults.get(knob):
            continue
        try:
            is_default = knob not in entry.defaults and value(text, known.kind) == known.default
        except ValueError:
            is_default = False
        if knob == entry.first:
            settings.append(text)
        elif not is_default:
            settings.append(f"{knob}={text}")
    return f"{name}({','.join(settings)})" if settings else name


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _known(name: str) -> str:
    listed = ", ".join(f"{knob}={default}" for knob, default in knobs(name).items())
    return f"Knobs of {name}: {listed}." if listed else f"{name} has no knobs."


def _text(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _from(knobs: type) -> dict[str, _Knob]:
    kinds = get_type_hints(knobs)
    return {
        known.name: _Knob(kinds[known.name], known.default, known.metadata.get(RELATIVE)) for known in fields(knobs)
    }


def _scaling(knobs: type) -> dict[str, _Knob]:
    """Of an autoscaler: each original has a lowest size that its operator sets."""
    return _from(knobs) | {_FLOOR: _Knob(int, 1)}


_ENTRIES: dict[str, _Entry] = {
    "snapshot": _Entry(
        {knob: _Knob(kind, default) for knob, (kind, default) in snapshot.knobs().items()},
        lambda values, place: snapshot.Snapshot(place.setting, name=place.name, **values),
    ),
    "static": _Entry(
        _from(StaticKnobs),
        lambda values, place: Static(StaticKnobs(**values), name=place.name),
        first="replicas",
    ),
    "dynamo-load": _Entry(
        _scaling(DynamoLoadKnobs),
        lambda values, place: Dynamo(DynamoLoadKnobs(**values), place.facts, *place.bounds, name=place.name),
    ),
    "dynamo-throughput": _Entry(
        _scaling(DynamoThroughputKnobs),
        lambda values, place: Dynamo(DynamoThroughputKnobs(**values), place.facts, *place.bounds, name=place.name),
    ),
    "knative-kpa": _Entry(
        _scaling(KpaKnobs),
        lambda values, place: KnativeKpa(KpaKnobs(**values), place.bounds[0], name=place.name),
    ),
    "hpa": _Entry(
        _scaling(HpaKnobs),
        lambda values, place: Hpa(HpaKnobs(**values), *place.bounds, name=place.name),
        defaults={"target": "0.5c"},
    ),
    "hpa-gpu": _Entry(
        _scaling(HpaGpuKnobs),
        lambda values, place: HpaGpu(HpaGpuKnobs(**values), *place.bounds, name=place.name),
    ),
    "keda": _Entry(
        _scaling(KedaKnobs),
        lambda values, place: Keda(KedaKnobs(**values), *place.bounds, name=place.name),
    ),
    "ray-serve": _Entry(
        _scaling(RayServeKnobs),
        lambda values, place: RayServe(RayServeKnobs(**values), *place.bounds, name=place.name),
    ),
    "llm-d": _Entry(
        _scaling(LlmDKnobs),
        lambda values, place: LlmD(LlmDKnobs(**values), place.setting.engine.kv_tokens, *place.bounds, name=place.name),
    ),
    "clairvoyant": _Entry(
        _from(ClairvoyantKnobs),
        lambda values, place: Clairvoyant(ClairvoyantKnobs(**values), name=place.name),
    ),
}
