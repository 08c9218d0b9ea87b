"""Policy specs as users write them: ``knative-kpa``, ``static(4)``, ``hpa(target=0.5c, tolerance=0)``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

_SPEC = re.compile(r"\s*(?P<name>[a-z][a-z0-9-]*)\s*(?:\((?P<arguments>[^()]*)\))?\s*")
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Spec:
    """A name and its settings, as text."""

    name: str
    values: Mapping[str, str] = field(default_factory=dict)
    first: str | None = None
    """A setting without a name."""


def parse(text: str) -> Spec:
    """Reads a spec.

    Raises:
        SnapshotError: ``configuration_invalid`` where it is not one.
    """
    found = _SPEC.fullmatch(text)
    if found is None:
        raise invalid(f"policy {text!r} cannot be read", "Write name, name(value) or name(knob=value, knob=value).")
    first = None
    values: dict[str, str] = {}
    parts = [part.strip() for part in (found["arguments"] or "").split(",")]
    for number, part in enumerate(parts if parts != [""] else []):
        knob, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and number == 0 and knob:
            first = knob
            continue
        if not knob or not value:
            raise invalid(f"policy {text!r}: expected knob=value, not {part!r}", "Write name(knob=value, knob=value).")
        if knob in values:
            raise invalid(f"policy {text!r}: {knob} stands twice", "Leave one of them.")
        values[knob] = value
    return Spec(found["name"], values, first)


@dataclass(frozen=True)
class Relative:
    """So many times a replica's capacity: ``0.5c``."""

    share: float


def value(text: str, kind: type) -> int | float | bool | str | Relative:
    """Reads one setting; a ``float`` may be relative.

    Raises:
        ValueError: says what was expected.
    """
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"expected true or false, not {text}")
        return _WORDS[text.lower()]
    if kind is str:
        return text
    number, relative = (text[:-1], True) if kind is float and text.endswith("c") else (text, False)
    try:
        read = kind(number)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ValueError(f"expected {expected}, not {text}") from None
    return Relative(read) if relative else read


def invalid(message: str, remedy: str) -> SnapshotError:
    return SnapshotError(Reason.CONFIGURATION_INVALID, message, remedy)
