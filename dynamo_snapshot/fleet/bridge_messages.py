"""The lines that the controller and its Dynamo child exchange: one JSON object each."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dynamo_snapshot.model import WorkerLoad


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The child's Dynamo runtime has just answered."""


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """The planner wants other numbers; None: it says nothing of that role."""

    id: int
    prefill: int | None
    decode: int | None


class Loads(msgspec.Struct, frozen=True, tag="loads"):
    """The newest load of each worker, by instance id (JSON has no integer keys)."""

    loads: dict[str, WorkerLoad]


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """To the child: acknowledge this decision."""

    id: int


FromChild: TypeAlias = Alive | Decided | Loads
