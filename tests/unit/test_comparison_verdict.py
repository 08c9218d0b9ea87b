"""Who beats whom: from given rows, no simulation."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparison import row

from dynamo_snapshot.replay.comparison.estimate import difference, estimate
from dynamo_snapshot.replay.comparison.frontier import cheapest, frontier, most_attaining
from dynamo_snapshot.replay.comparison.rows import Row, Start, family, scenes
from dynamo_snapshot.replay.comparison.verdict import points, unbeaten, verdicts
from dynamo_snapshot.replay.comparison.wording import scene_sentence, verdict_sentence


def test_a_rival_that_is_better_in_both_beats_ours() -> None:
    (verdict,) = verdicts([row("snapshot", 0.97, 3.4), row("static(4)", 0.98, 3.3)])
    assert not verdict.stands
    assert [comparison.rival.name for comparison in verdict.beaten_by] == ["static(4)"]
    assert "is beaten by static(4) (restore-2s, 98.0 % at 3.30)" in verdict_sentence(verdict)


@pytest.mark.parametrize(("attainment", "hours"), [(0.99, 3.5), (0.96, 3.0), (0.96, 3.5)])
def test_a_rival_that_pays_more_or_keeps_less_does_not(attainment: float, hours: float) -> None:
    (verdict,) = verdicts([row("snapshot", 0.97, 3.4), row("hpa", attainment, hours)])
    assert verdict.stands
    assert verdict.clear


@pytest.mark.parametrize(("attainment", "hours"), [(0.97, 3.3), (0.98, 3.4)])
def test_equal_in_one_and_better_in_the_other_beats(attainment: float, hours: float) -> None:
    (verdict,) = verdicts([row("snapshot", 0.97, 3.4), row("hpa", attainment, hours)])
    assert not verdict.stands


def test_an_equal_rival_is_level_and_no_winner() -> None:
    (verdict,) = verdicts([row("snapshot", 0.97, 3.4), row("hpa", 0.97, 3.4)])
    assert verdict.stands
    assert len(verdict.level_with) == 1
    assert "as good within the seeds' interval is hpa" in verdict_sentence(verdict)


def test_what_the_seeds_scatter_by_decides_nothing() -> None:
    ours = [row("snapshot", share, hours, seed=seed) for seed, (share, hours) in enumerate([(0.95, 3.2), (0.99, 3.6)])]
    rival = [row("hpa", share, hours, seed=seed) for seed, (share, hours) in enumerate([(0.96, 3.1), (0.99, 3.5)])]
    (verdict,) = verdicts(ours + rival)
    assert verdict.stands
    assert not verdict.clear
    assert len(verdict.level_with) == 1


def test_a_difference_in_one_measure_beyond_the_scatter_beats() -> None:
    ours = [row("snapshot", 0.970, 3.4, seed=seed) for seed in range(3)]
    rival = [row("hpa", share, 3.0 + seed / 100, seed=seed) for seed, share in enumerate([0.969, 0.970, 0.972])]
    (verdict,) = verdicts(ours + rival)
    assert not verdict.stands


def test_a_cheaper_rival_that_is_worse_only_within_the_scatter_is_an_open_question_and_said() -> None:
    ours = [row("snapshot", share, 3.4, seed=seed) for seed, share in enumerate([0.968, 0.970, 0.972])]
    (verdict,) = verdicts([*ours, row("static(4)", 0.9699, 2.0, start=Start.NONE, startup="none")])
    assert verdict.stands
    assert not verdict.clear
    assert [comparison.rival.name for comparison in verdict.contested_by] == ["static(4)"]
    assert "leave open whether by static(4) (97.0 % at 2.00)" in verdict_sentence(verdict)


def test_the_ceiling_is_no_rival_and_ours_none_of_itself() -> None:
    found = verdicts([row("snapshot", 0.97, 3.4), row("snapshot(miss_cost_s=9)", 0.98, 3.3), row("clairvoyant", 1, 2)])
    assert [verdict.stands for verdict in found] == [True, True]


def test_cold_started_rivals_count_beside_restored_ones() -> None:
    cold = row("hpa", 0.98, 3.3, start=Start.COLD, startup="cold-45s")
    (verdict,) = verdicts([row("snapshot", 0.97, 3.4), row("hpa", 0.9, 3.3), cold])
    assert [comparison.rival.startup for comparison in verdict.beaten_by] == ["cold-45s"]


def test_scenes_do_not_mix_and_cold_starts_of_no_restore_time_join_each() -> None:
    rows = [
        row("snapshot", 0.97, 3.4),
        row("snapshot", 0.96, 3.4, restore_s=8.0, startup="restore-8s"),
        row("static(4)", 0.98, 3.3, half="second"),
        row("hpa", 0.9, 5, start=Start.COLD, startup="cold-45s", restore_s=None),
    ]
    by_scene = {(scene.restore_s, scene.half): len(members) for scene, members in scenes(rows).items()}
    assert by_scene == {(2.0, "first"): 2, (8.0, "first"): 2, (2.0, "second"): 1}
    assert all(verdict.stands for verdict in verdicts(rows))


def test_settings_that_stand_are_counted_by_scene() -> None:
    found = verdicts([row("snapshot", 0.97, 3.4), row("snapshot(k=1)", 0.9, 3.4), row("hpa", 0.95, 3.4)])
    counts = unbeaten(found)
    assert list(counts.values()) == [(1, 1, 2, 1)]
    assert "1 of 2 settings of ours" in scene_sentence(found[0].scene, counts)


@pytest.mark.parametrize("others", [[], [row("clairvoyant", 1, 2)], [row("snapshot(miss_cost_s=9)", 0.98, 3.3)]])
def test_where_there_is_no_rival_none_is_said_to_be_beaten(others: list[Row]) -> None:
    found = verdicts([row("snapshot", 0.97, 3.4), *others])
    for verdict in found:
        assert verdict_sentence(verdict).endswith(" GPU-hours, compared with no rival.")
    said = scene_sentence(found[0].scene, unbeaten(found))
    assert said.endswith(
        "1 setting of ours was compared with no rival."
        if len(found) == 1
        else "2 settings of ours were compared with no rival."
    )


@pytest.mark.parametrize(("spec", "parts"), [("hpa", ("hpa", "")), ("static(4)", ("static", "4"))])
def test_a_policy_is_a_family_and_its_knobs(spec: str, parts: tuple[str, str]) -> None:
    assert family(spec) == parts
    assert row(spec, 1, 1).spec == spec


def test_the_interval_is_students() -> None:
    """Five values with a standard deviation of 1: t of four degrees is 2.776."""
    spread = math.sqrt(10 / 4)
    values = [value / spread for value in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    assert estimate(values).half_width == pytest.approx(2.776 / math.sqrt(5))
    assert estimate([3.0]).half_width == 0


def test_welch_is_the_textbook_one() -> None:
    """Equal spreads and sizes: the degrees of both, and errors that add up."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = difference([value + 10 for value in values], values)
    assert found.mean == pytest.approx(10)
    assert found.half_width == pytest.approx(2.306 * math.sqrt(2 * 2.5 / 5))


def test_many_seeds_come_close_to_the_normal_quantile_from_above() -> None:
    values = [NormalDist().inv_cdf((index + 0.5) / 400) for index in range(400)]
    exact = NormalDist().inv_cdf(0.975) * math.sqrt(sum(value**2 for value in values) / 399 / 400)
    assert exact < estimate(values).half_width < 1.02 * exact


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 20)), min_size=1, max_size=30))
def test_no_point_of_a_frontier_is_beaten_and_each_other_one_is(pairs: list[tuple[float, float]]) -> None:
    there = points([row(f"hpa({index})", share, hours) for index, (share, hours) in enumerate(pairs)])
    best = frontier(there)

    def at_least(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] >= other[0] and one[1] <= other[1]

    kept = [(point.attainment.mean, point.gpu_hours.mean) for point in best]
    assert not any(at_least(one, other) for one in kept for other in kept if one is not other)
    assert all(any(at_least(one, pair) for one in kept) for pair in pairs)


def test_recommendations_are_the_cheapest_that_is_good_enough_and_the_best_that_is_paid_for() -> None:
    there = points([row("a", 0.90, 2), row("b", 0.98, 3), row("c", 0.99, 4), row("d", 0.99, 5)])
    assert (cheapest(there, 0.97) or there[0]).name == "b"
    assert cheapest(there, 0.999) is None
    assert (most_attaining(there) or there[0]).name == "c"
    assert (most_attaining(there, 3.5) or there[0]).name == "b"
    assert most_attaining(there, 1) is None


def test_good_enough_means_the_whole_interval() -> None:
    there = points([row("a", share, 2, seed=seed) for seed, share in enumerate([0.96, 0.99, 0.98])])
    assert there[0].attainment.mean > 0.97
    assert cheapest(there, 0.97) is None
