"""What a demo run must show, as a list of checks with their bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynamo_snapshot.local.measures import all_distinct

PINNED_REQUESTS = 20


class Check(NamedTuple):
    """One expectation: what was measured, what it had to be, and whether it was."""

    name: str
    value: Any
    bound: str
    passed: bool


def at_least(name: str, value: float | None, bound: float) -> Check:
    return Check(name, value, f"at least {bound:g}", value is not None and value >= bound)


def at_most(name: str, value: float | None, bound: float, unit: str = "") -> Check:
    return Check(name, value, f"at most {bound:g}{unit}", value is not None and value <= bound)


def equal(name: str, value: Any, bound: Any) -> Check:
    return Check(name, value, f"{bound}", value == bound)


def gated_checks(result: dict[str, Any], planned_requests: int) -> list[Check]:
    """The checks of a run with the gate on; ``result`` is the demo's, but for its checks."""
    requests, restore = result["requests"], result["restore"]
    killed = str(result["replacement"]["instance_id"])
    restored = [row for row in result["replicas"] if row["way"] == "restore" and row["registered_at"] is not None]
    pins = result["pinned"]
    everyone = [row for row in result["replicas"] if row["registered_at"] is not None]
    return [
        equal("requests.sent", requests["sent"], planned_requests),
        equal("requests.failed", requests["failed"], 0),
        equal("requests.held_back", requests["held_back"], 0),
        at_least("requests.migrated", requests["migrated"], 1),
        equal(
            "requests migrated from other workers than the killed one", _others(requests["migrated_from"], killed), 0
        ),
        equal("cold_start.count", result["cold_start"]["count"], 1),
        equal("capture.count", result["capture"]["count"], 1),
        at_least("restore.count", restore["count"], 3),
        equal("restore.failed", restore["failed"], 0),
        at_least("most replicas serving at once", result["scale_out"]["most_serving"], 4),
        at_most("restore.ordered_to_serving_s median", restore["ordered_to_serving_s"]["median"], 0.8, " s"),
        Check("instance ids", len(everyone), "all distinct", all_distinct(row["instance_id"] for row in everyone)),
        Check(
            "first random numbers", len(everyone), "all distinct", all_distinct(row["first_random"] for row in everyone)
        ),
        Check(
            "restored workers that answered their pinned requests",
            sum(pins.get(row["replica"], {}).get("answered", 0) >= PINNED_REQUESTS for row in restored),
            f"all {len(restored)}, {PINNED_REQUESTS} each",
            bool(restored)
            and all(pins.get(row["replica"], {}).get("answered", 0) >= PINNED_REQUESTS for row in restored),
        ),
        equal("routed_before_serving", result["routed_before_serving"], 0),
        equal("registrations that no replica explains", len(result["unexplained_registrations"]), 0),
        at_most("replacement.out_of_discovery_s", result["replacement"]["out_of_discovery_s"], 0.5, " s"),
        at_most("replacement.serving_s", result["replacement"]["serving_s"], 1.5, " s"),
        at_least("scale_in.drained", result["scale_in"]["drained"], 3),
        equal("scale_in.serving", result["scale_in"]["serving"], 1),
        at_most("load generator and frontend, cores", result["load_cores"]["both"], 1.0),
        equal("left_behind", result["left_behind"], 0),
    ]


def control_checks(result: dict[str, Any]) -> list[Check]:
    """The check of a run with the gate off: without the gate, workers are seen before they can serve."""
    return [
        at_least("routed_before_serving, with the gate off", result["routed_before_serving"], 1),
        equal("left_behind", result["left_behind"], 0),
    ]


def _others(migrated_from: dict[str, int], killed: str) -> int:
    return sum(count for worker, count in migrated_from.items() if worker != killed)
