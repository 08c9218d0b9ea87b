"""Plots, page and sentences of a comparison, from given rows."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from rich.console import Console
from support.comparison import row

from dynamo_snapshot.cli.replay import print_scene
from dynamo_snapshot.replay.comparison.advice import Wish, advise
from dynamo_snapshot.replay.comparison.frontier_plot import frontier_plot
from dynamo_snapshot.replay.comparison.lanes import Lane, Size
from dynamo_snapshot.replay.comparison.marks import looks
from dynamo_snapshot.replay.comparison.overview_plot import overview
from dynamo_snapshot.replay.comparison.page import MOST_LANES, render
from dynamo_snapshot.replay.comparison.replicas_plot import arrival_rates
from dynamo_snapshot.replay.comparison.rows import Row, Start
from dynamo_snapshot.replay.comparison.table import HEADER, cells, ordered
from dynamo_snapshot.replay.comparison.verdict import points

ROWS = [
    row("clairvoyant", 1.0, 2.0),
    row("snapshot(miss_cost_s=10)", 0.97, 3.4, seed=0),
    row("snapshot(miss_cost_s=10)", 0.98, 3.5, seed=1),
    row("snapshot(miss_cost_s=100)", 0.99, 4.0),
    row("static(4)", 0.94, 3.8, start=Start.NONE, startup="none"),
    row("static(8)", 0.995, 7.6, start=Start.NONE, startup="none"),
    row("hpa", 0.8, 3.0),
    row("hpa", 0.5, 4.0, start=Start.COLD, startup="cold-45s"),
]


class Page(HTMLParser):
    """Tags with their attributes, and which are still open."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(rows: list[Row], lanes: list[Lane]) -> tuple[str, Page]:
    text = render(rows, lanes, {("code", "first"): [1.0, 2.0, 90.0]}, {("code", "first"): 100.0}, {"a": "<b>"})
    parsed = Page()
    parsed.feed(text)
    return text, parsed


def lane(of: Row) -> Lane:
    return Lane(of, (Size(0.0, 1, 0), Size(10.0, 1, 2), Size(12.0, 3, 0)))


def test_the_page_is_whole_and_loads_nothing_from_elsewhere() -> None:
    text, parsed = page(ROWS, [lane(one) for one in ROWS])
    assert parsed.open == []
    assert not [tag for tag, attributes in parsed.tags if {"src", "href", "xlink:href"} & attributes.keys()]
    assert "://" not in text.replace("http://www.w3.org", "")
    assert "prefers-color-scheme: dark" in text
    assert "&lt;b&gt;" in text
    assert "is beaten by no rival" in text


def test_a_page_without_rivals_marks_nothing_as_good() -> None:
    text, _ = page([row("snapshot", 0.97, 3.4)], [])
    assert "compared with no rival" in text
    assert "✓" not in text


def test_every_point_has_a_mark_that_says_what_it_is() -> None:
    _, parsed = page(ROWS, [])
    tips = [attributes["data-tip"] or "" for tag, attributes in parsed.tags if "data-tip" in attributes]
    for name in ("snapshot(miss_cost_s=10), restore-2s, 2 seeds: 97.50 %", "static(8), none", "hpa, cold-45s"):
        assert any(tip.startswith(name) for tip in tips)
    assert len(tips) == len(points(ROWS))


def test_ours_is_joined_by_a_line_from_the_cheapest_on() -> None:
    plot = frontier_plot(points(ROWS), looks([one.policy for one in ROWS]), "x")
    (line,) = re.findall(r'<path d="([^"]*)" fill="none" stroke="#0072B2"', plot)
    xs = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
    assert len(xs) == 2
    assert xs == sorted(xs)


def test_higher_attainment_is_drawn_higher_and_misses_that_halve_take_equal_steps() -> None:
    rows = [row(f"static({index})", share, 1.0 + index) for index, share in enumerate([0.6, 0.8, 0.9])]
    plot = frontier_plot(points(rows), looks(["static"]), "x")
    marks = re.findall(r"translate\([\d.]+ ([\d.]+)\)[^>]*data-tip", plot)
    low, middle, high = (float(height) for height in marks)
    assert low > middle > high
    assert low - middle == pytest.approx(middle - high, abs=0.2)


def test_no_two_policies_look_alike_and_ours_looks_the_same_everywhere() -> None:
    names = ["snapshot", "static", "clairvoyant", "hpa", "hpa-gpu", "keda", "knative-kpa", "ray-serve", "llm-d"]
    names += ["dynamo-load", "dynamo-throughput"]
    found = looks(names)
    assert len({(look.colour, look.shape) for look in found.values()}) == len(names)
    assert found["snapshot"] == looks(["snapshot", "zzz"])["snapshot"]


def test_the_overview_is_one_svg_document_with_a_panel_a_scene() -> None:
    text = overview([*ROWS, row("snapshot", 0.9, 3, restore_s=8.0)], "all")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert text.count("code, first half: restore") == 2
    assert "prefers-color-scheme:dark" in text


def test_replicas_are_drawn_for_each_run_of_a_scene_and_for_a_choice_of_very_many() -> None:
    _, parsed = page(ROWS, [lane(one) for one in ROWS if one.seed == 0])
    shown = [attributes["data-tip"] for tag, attributes in parsed.tags if "name tip" in (attributes.get("class") or "")]
    assert shown == [one.spec for one in ROWS if one.seed == 0]
    many = [row(f"hpa(target={index})", 0.5, 3.0) for index in range(MOST_LANES + 1)]
    _, parsed = page(many, [lane(one) for one in many])
    shown = [attributes["data-tip"] for tag, attributes in parsed.tags if "name tip" in (attributes.get("class") or "")]
    assert shown == ["hpa(target=0)"]


def test_arrival_rates_count_every_request_once() -> None:
    rates = arrival_rates([0.0, 1.0, 6.0, 99.9, 100.0], 100.0)
    assert rates[0] == (2.5, 0.4)
    assert sum(rate for _, rate in rates) * 5 == pytest.approx(5)


def test_the_table_has_ours_first_the_ceiling_last_and_every_column() -> None:
    lines = [cells(point) for point in ordered(ROWS)]
    assert [line[0] for line in lines] == [
        "snapshot(miss_cost_s=10)",
        "snapshot(miss_cost_s=100)",
        "hpa",
        "hpa",
        "static(4)",
        "static(8)",
        "clairvoyant",
    ]
    assert {len(line) for line in lines} == {len(HEADER)}
    assert lines[0][2].startswith("97.5 ± ")
    assert lines[1][2] == "99.0 %"


def test_names_shorter_than_their_heading_do_not_break_it() -> None:
    text = io.StringIO()
    print_scene(Console(file=text, width=1000), "scene", points([row("hpa", 0.5, 3)]))
    assert [line.split(" ")[0] for line in text.getvalue().splitlines()] == ["scene", "policy", "hpa"]


@pytest.mark.parametrize("width", [80, 1000])
def test_no_name_and_no_figure_is_cut_in_a_narrow_terminal(width: int) -> None:
    text = io.StringIO()
    name = "ray-serve(target_ongoing_requests=0.5c,downscale_delay_s=60)"
    rows = [row(name, 0.5, 3, scalings=1234), row(name, 0.7, 3.4, seed=1, scalings=1234)]
    print_scene(Console(file=text, width=width), "scene", points(rows))
    _, *lines = text.getvalue().splitlines()
    assert "".join(line.split(" ")[0] for line in lines) == f"policy{name}"
    assert all(figure in text.getvalue() for figure in ("restore-2s", "3.20 ±", "2.54", "1234"))


def test_a_request_that_never_had_a_token_is_told_as_that() -> None:
    (point,) = points([row("hpa", 0.5, 3, ttft_p99_s=None)])
    assert "never" in cells(point)


def test_the_cheapest_setting_that_is_good_enough_is_recommended_beside_a_fleet_of_constant_size() -> None:
    advice = advise(points(ROWS), Wish(0.985), 1.5)
    assert advice.take is not None
    assert advice.take.name == "snapshot(miss_cost_s=100)"
    assert "Take miss_cost_s=100: 99.0 % of the requests have their first token within 1.5 s" in advice.sentence
    assert "a fleet of constant size needs 8 replicas, 1.9 times as much" in advice.sentence


def test_where_nothing_is_good_enough_the_best_is_named() -> None:
    advice = advise(points(ROWS), Wish(0.999), 1.5)
    assert "No setting keeps 99.9 %. The best is miss_cost_s=100" in advice.sentence


def test_a_budget_is_kept_to() -> None:
    advice = advise(points(ROWS), Wish(gpu_hours=3.5), 1.5)
    assert advice.take is not None
    assert advice.take.name == "snapshot(miss_cost_s=10)"
    advice = advise(points(ROWS), Wish(gpu_hours=1.0), 1.5)
    assert advice.take is None
    assert "No setting stays within 1 GPU-hours" in advice.sentence


def test_a_constant_size_that_is_cheaper_is_said() -> None:
    advice = advise(points([row("snapshot", 0.99, 4), row("static(1)", 0.99, 8)]), Wish(0.9), 1.5)
    assert "a fleet of constant size needs 1 replica, 2.0 times as much" in advice.sentence
    advice = advise(points([row("snapshot", 0.99, 4), row("static(3)", 0.99, 3)]), Wish(0.9), 1.5)
    assert "take the constant size here" in advice.sentence
