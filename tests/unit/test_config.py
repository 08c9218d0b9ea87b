"""fleet.yaml is refused with file, line, field and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_snapshot.config import Role, Servers, load_fleet
from dynamo_snapshot.errors import SnapshotError
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


@pytest.mark.parametrize(
    ("change", "line", "field", "expected"),
    [
        (("name: tiny", "nmae: tiny"), 1, "model.name", "required"),
        (("    worker:", "    wokrer:"), 5, "pools.decode.worker", "required"),
        (("    worker:", "    min_replicas: 9\n    max_replicas: 2\n    worker:"), 5, "pools.decode", "above max"),
        (("    worker:", "    min_replicas: many\n    worker:"), 6, "pools.decode.min_replicas", "integer"),
        (("pools:", "servers:\n  etcd: localhost\npools:"), 5, "servers.etcd", "http://127.0.0.1:2379"),
        (("pools:", "servers:\n  etcd: http://etcd\npools:"), 5, "servers.etcd", "with its port"),
        (("pools:", "servers:\n  nats: http://127.0.0.1:4222\npools:"), 5, "servers.nats", "nats://127.0.0.1:4222"),
        (("pools:", "agent:\n  rpc_ports: [30000, 20000]\npools:"), 5, "agent.rpc_ports", "above the last"),
        (("pools:", "lease_ttl_s: 1\npools:"), 4, "lease_ttl_s", "greater than or equal to 2"),
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


def test_two_pools_of_one_role_are_refused(tmp_path: Path) -> None:
    second = "  other:\n    worker:\n      command: [python]\n"
    with pytest.raises(SnapshotError, match="2 pools have role decode"):
        load_fleet(write(tmp_path, MINIMAL + second))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("model: [", ":1: not valid YAML"), ("- a\n", "expected a mapping"), ("", "expected a mapping")],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        load_fleet(write(tmp_path, text))
    assert expected in caught.value.message


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
