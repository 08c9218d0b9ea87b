"""Is a capture worth its while? Only where a restore is expected to beat a cold start by enough."""

from __future__ import annotations

from dynamo_snapshot.model import Value

RESTORE_FIXED_S = 0.25
"""What a restore takes whatever its size: a house, CRIU's own work, the worker's resume and self-test."""
RESTORE_BYTES_PER_S = 1.2e9
"""CRIU fills memory from the page cache with one thread; measured at 1.2 to 1.35 GB/s."""


class BreakEven(Value, frozen=True):
    worthwhile: bool
    gain_s: float
    """Seconds that one restore is expected to save; negative where it loses."""
    reason: str


def expected_restore_s(resident_bytes: int, bytes_per_s: float = RESTORE_BYTES_PER_S) -> float:
    """Returns how long a restore should take that no restore has been measured for yet."""
    return RESTORE_FIXED_S + resident_bytes / bytes_per_s


def break_even(cold_start_s: float, restore_s: float, minimum_gain_s: float) -> BreakEven:
    """Weighs a measured cold start against an expected or measured restore, in seconds."""
    gain = cold_start_s - restore_s
    worthwhile = gain >= minimum_gain_s
    return BreakEven(
        worthwhile=worthwhile,
        gain_s=gain,
        reason=(
            f"a restore ({restore_s:.2f} s) {'saves' if gain >= 0 else 'loses'} {abs(gain):.2f} s against a cold start "
            f"({cold_start_s:.2f} s); a capture is worth its while from {minimum_gain_s:.2f} s on"
        ),
    )
