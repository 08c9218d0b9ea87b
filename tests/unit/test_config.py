"""fleet.yaml is refused with file, line, field and what was expected."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dynamo_snapshot.config import PLACEHOLDERS, Fleet, Pool, Role, Servers, load_fleet
from dynamo_snapshot.config_wording import sentence
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.rules import fleet_rules
from dynamo_snapshot.model import Reason

MINIMAL = """\
model:
  name: tiny
  path: model
pools:
  decode:
    worker:
      command: [python, -m, dynamo.mocker]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_minimal_file_gets_the_documented_defaults(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, MINIMAL))
    assert fleet.pools["decode"].role is Role.DECODE
    assert fleet.servers.etcd == "embedded"
    assert fleet.model.path == tmp_path / "model", "relative paths start at the file's folder"


def test_the_agent_s_relative_paths_start_at_the_file_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "fleet.yaml"
    file.write_text(MINIMAL + "agent: {runtime_dir: run, store_dir: ./store, criu: /opt/criu}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for named in (file, Path("..") / "fleet.yaml", tmp_path / "link" / "fleet.yaml"):
        agent = load_fleet(named).agent
        assert [agent.runtime_dir, agent.store_dir] == [tmp_path / "run", tmp_path / "store"], "in one spelling"
        assert agent.criu == Path("/opt/criu")


@pytest.mark.parametrize(
    ("change", "line", "field", "expected"),
    [
        (("name: tiny", "nmae: tiny"), 1, "model.name", "required, and not there"),
        (("    worker:", "    wokrer:"), 6, "pools.decode.wokrer", "did you mean worker?"),
        (("    worker:", "    min_replicas: 9\n    max_replicas: 2\n    worker:"), 5, "pools.decode", "above max"),
        (
            ("    worker:", "    min_replicas: many\n    worker:"),
            6,
            "pools.decode.min_replicas",
            "expected an integer, not 'many'",
        ),
        (("pools:", "servers:\n  etcd: localhost\npools:"), 5, "servers.etcd", "http://127.0.0.1:2379"),
        (("pools:", "servers:\n  etcd: http://etcd\npools:"), 5, "servers.etcd", "with its port"),
        (("pools:", "servers:\n  nats: http://127.0.0.1:4222\npools:"), 5, "servers.nats", "nats://127.0.0.1:4222"),
        (("pools:", "agent:\n  rpc_ports: [30000, 20000]\npools:"), 5, "agent.rpc_ports", "above the last"),
        (
            ("pools:", "agent:\n  rpc_ports: [1, 2, 3]\npools:"),
            5,
            "agent.rpc_ports",
            "at most 2 entries, not a list of 3",
        ),
        (("pools:", "agent:\n  gpu: {enabled: maybe}\npools:"), 5, "agent.gpu.enabled", "expected true or false"),
        (
            ("pools:", "agent:\n  gpu: {loader_lane: 2}\npools:"),
            5,
            "agent.gpu.loader_lane",
            "did you mean loader_lanes?",
        ),
        (("pools:", "agent: 7\npools:"), 4, "agent", "expected a mapping, not 7"),
        (("pools:", "colour: red\npools:"), 4, "colour", "no such field; there are name, namespace, model, pools"),
        (("  decode:", "  De code:"), 5, "pools.De code", "lower-case letters, digits and '-'"),
        (("tiny", "''"), 2, "model.name", "must not be empty"),
        (("[python, -m, dynamo.mocker]", "[]"), 7, "pools.decode.worker.command", "must not be empty"),
        (("[python, -m, dynamo.mocker]", "[1]"), 7, "pools.decode.worker.command.0", "expected text, not 1"),
        (
            ("mocker]", "mocker, --path, '{modelpath}']"),
            7,
            "pools.decode.worker.command",
            "{modelpath}; there are {model_",
        ),
        (("    worker:", "    role: prefill\n    worker:"), 4, "pools", "no pool has role decode"),
        (("pools:", "agent:\n  gpu: {enabled: 1}\npools:"), 5, "agent.gpu.enabled", "expected true or false, not 1"),
        (("pools:", "planner: {headroom_replicas: true}\npools:"), 4, "planner.headroom_replicas", "integer, not true"),
        (("pools:", "planner: {tick_s: '1'}\npools:"), 4, "planner.tick_s", "expected a number, not '1'"),
        (("pools:", "planner: {tick_s: 1e-9}\npools:"), 4, "planner.tick_s", "at least 0.05, not 1e-09"),
        (("pools:", "planner: {tick_s: 61}\npools:"), 4, "planner.tick_s", "at most 60, not 61"),
        (
            ("pools:", "planner: {miss_cost_s: .inf}\npools:"),
            4,
            "planner.miss_cost_s",
            "expected a finite number, not inf",
        ),
        (("pools:", "planner: {miss_cost_s: 1e300}\npools:"), 4, "planner.miss_cost_s", "at most 9.0072e+15"),
        (
            ("pools:", "planner: {scale_down_after_s: true}\npools:"),
            4,
            "planner.scale_down_after_s",
            "number, not true",
        ),
        (("pools:", "agent:\n  rpc_ports: ['1', 2]\npools:"), 5, "agent.rpc_ports.0", "expected an integer, not '1'"),
        (("pools:", f"lease_ttl_s: 0x{'f' * 5000}\npools:"), 4, "lease_ttl_s", "not a number of hundreds of digits"),
        (("pools:", "lease_ttl_s: 1\npools:"), 4, "lease_ttl_s", "expected a number of at least 2, not 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    tmp_path: Path, change: tuple[str, str], line: int, field: str, expected: str
) -> None:
    path = write(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(SnapshotError) as caught:
        load_fleet(path)
    assert caught.value.reason is Reason.CONFIGURATION_INVALID
    matching = [entry for entry in caught.value.message.splitlines() if f": {field}: " in entry]
    assert matching, caught.value.message
    assert matching[0].startswith(f"{path}:{line}: ")
    assert expected in matching[0]


@pytest.mark.parametrize(
    "body",
    [
        "model:\n  name: again\n  path: .\n",
        "lease_ttl_s: 3\nlease_ttl_s: 4\n",
        "agent: {gpu: {loader: true, loader: false}}\n",
    ],
)
def test_a_field_that_stands_twice_is_refused_with_its_line(tmp_path: Path, body: str) -> None:
    path = write(tmp_path, body + MINIMAL if body.startswith("model") else MINIMAL + body)
    with pytest.raises(SnapshotError) as caught:
        load_fleet(path)
    assert re.match(rf"{path}:\d+: (model|lease_ttl_s|loader) stands here and in line \d+: ", caught.value.message)


def test_anchors_that_repeat_a_mapping_are_not_taken_for_fields_that_stand_twice(tmp_path: Path) -> None:
    second = "  prefill: {role: prefill, worker: *w}\n"
    fleet = load_fleet(write(tmp_path, MINIMAL.replace("worker:", "worker: &w") + second))
    assert fleet.pools["prefill"].worker == fleet.pools["decode"].worker


@pytest.mark.parametrize("word", ["${HOME}/x", "{{template}}", '{"a": {"b": 1}}', "{a,b}", "{}", "{model_path}/x"])
def test_braces_that_are_the_commands_own_are_let_be(tmp_path: Path, word: str) -> None:
    fleet = load_fleet(write(tmp_path, MINIMAL.replace("[python, -m, dynamo.mocker]", f"[python, '{word}']")))
    assert fleet.pools["decode"].worker.command[1] == word


def test_every_placeholder_is_filled_in(tmp_path: Path) -> None:
    command = f"[python, {', '.join(repr(name) for name in PLACEHOLDERS)}]"
    fleet = load_fleet(write(tmp_path, MINIMAL.replace("[python, -m, dynamo.mocker]", command)))
    filled = fleet_rules(fleet, "http://127.0.0.1:1", "nats://127.0.0.1:2", {}).pools["decode"].worker.command
    assert not [word for word in filled if "{" in word]


def test_a_value_of_any_kind_is_refused_in_our_words() -> None:
    """Every field of the file is given what it cannot be: no sentence is the validator's."""
    good = {"model": {"name": "a", "path": "b"}, "pools": {"decode": {"worker": {"command": ["c"]}}}}
    theirs = re.compile(r"[Ii]nput|[Vv]alid |\bstring\b|dictionary|Field required|pydantic")
    said = set()
    for way, section in sections(Fleet, ()):
        for field in section.model_fields:
            for wrong in (None, [], {}, "x" * 3, -1, 1.5, True, float("nan"), float("inf"), [[]], {"": {}}, b"bytes"):
                data = copy.deepcopy(good)
                place: Any = data
                for part in way:
                    place = place.setdefault(part, {})
                place[field] = wrong
                try:
                    Fleet.model_validate(data)
                except ValidationError as error:
                    said |= {sentence(problem) for problem in error.errors()}
    assert len(said) > 30
    assert not [text for text in said if theirs.search(text)]


def sections(section: type[BaseModel], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    yield place, section
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from sections(kind, (*place, name))
        elif name == "pools":
            yield from sections(Pool, (*place, name, "decode"))


def test_two_pools_of_one_role_are_refused(tmp_path: Path) -> None:
    second = "  other:\n    worker:\n      command: [python]\n"
    with pytest.raises(SnapshotError, match="2 pools have role decode"):
        load_fleet(write(tmp_path, MINIMAL + second))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {name: 2020-13-45}", ": not valid YAML: month must be in 1..12"),
        ("model: {name: !!timestamp x}", ": not valid YAML: "),
        (f"lease_ttl_s: {'9' * 5000}", ": not valid YAML: "),
        ("[" * 3000, ": nested too deeply"),
        ('model: {name: a,\n  path: "a\\0b"}', ":2: a text with the character 0x0000 in it"),
        ('model: {name: "\\ud800"}', ":1: a text with the character 0xd800 in it"),
        ("model: [", ":1: not valid YAML"),
        ("- a\n", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        load_fleet(write(tmp_path, text))
    assert expected in caught.value.message


def test_a_number_with_an_exponent_needs_no_point(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, MINIMAL + "planner: {miss_cost_s: 1e2}\nagent: {minimum_free_bytes: 1e9}\n"))
    assert (fleet.planner.miss_cost_s, fleet.agent.minimum_free_bytes) == (100, 10**9)


def test_a_missing_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        load_fleet(tmp_path / "absent.yaml")


def test_a_servers_url_is_the_configured_one_else_what_its_starter_says() -> None:
    environment = {"ETCD_ENDPOINTS": "http://a:1,http://b:2", "NATS_SERVER": "nats://a:3"}
    assert Servers(etcd="http://mine:4").etcd_url(environment) == "http://mine:4"
    assert Servers().etcd_url(environment) == "http://a:1"
    assert Servers().nats_url(environment) == "nats://a:3"
    assert Servers().etcd_url({}) is None


def test_what_is_not_text_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(b"model: \xff")
    with pytest.raises(SnapshotError, match="not UTF-8 text: byte 7 is 0xff"):
        load_fleet(path)
