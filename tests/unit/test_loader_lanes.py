"""Beside CRIU a loader takes the threads that it needs, and leaves it the memory bandwidth of the others."""

from __future__ import annotations

import pytest

from dynamo_snapshot.agent.loader import lanes_beside

GIB = 1 << 30


@pytest.mark.parametrize(
    ("image_bytes", "weight_bytes", "lanes"),
    [
        (0, GIB, 14),
        (0.41 * GIB, 16 * GIB, 14),
        (2.3 * GIB, 15.3 * GIB, 6),
        (2.0 * GIB, 1.2 * GIB, 1),
        (2.0 * GIB, 0, 1),
    ],
)
def test_as_many_lanes_as_bring_the_weights_with_the_image(image_bytes: float, weight_bytes: float, lanes: int) -> None:
    assert lanes_beside(int(image_bytes), int(weight_bytes), most=14) == lanes


def test_never_more_than_there_are() -> None:
    assert lanes_beside(GIB, 400 * GIB, most=3) == 3
