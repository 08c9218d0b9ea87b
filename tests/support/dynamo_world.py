"""A real Dynamo around one worker: its environment, the frontend's API, and a look into etcd."""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
VERSIONS = ("1.6.1", "1.4.2")
"""The Dynamo releases that the hooks are tested with: this environment's, and last year's in one of its own."""

LOOPBACK = {
    "DYN_EVENT_PLANE": "nats",
    "DYN_DISCOVERY_BACKEND": "etcd",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "DYN_LOG": "info",
}


def python_of(version: str) -> Path:
    """The Python whose environment has this release of Dynamo."""
    if version == VERSIONS[0]:
        return Path(sys.executable)
    path = Path(os.environ.get("DYNAMO_1_4_2_PYTHON", REPOSITORY / f".venv-dynamo-{version}" / "bin" / "python"))
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make setup`")
    return path


def differences(version: str) -> dict[str, str]:
    """What a worker of that release needs beside :data:`LOOPBACK`."""
    interface = {"DYN_TCP_RESPONSE_STREAM_HOST": "lo"}  # an interface's name there
    return {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parents[1]}", **(interface if version == "1.4.2" else {})}


def environment(etcd_url: str, nats_url: str, namespace: str, **more: str) -> dict[str, str]:
    return {"ETCD_ENDPOINTS": etcd_url, "NATS_SERVER": nats_url, "DYN_NAMESPACE": namespace, **LOOPBACK, **more}


def keys(etcd_url: str, prefix: str) -> dict[str, dict[str, Any]]:
    """What etcd holds below ``prefix``: key to its value (parsed), lease and create revision."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    found = _post(f"{etcd_url}/v3/kv/range", {"key": _base64(prefix), "range_end": _base64(end)}).get("kvs", [])
    return {
        base64.b64decode(each["key"]).decode(): {
            "value": json.loads(base64.b64decode(each["value"])),
            "lease": int(each.get("lease", 0)),
            "created": int(each["create_revision"]),
        }
        for each in found
    }


def instances(etcd_url: str, namespace: str) -> dict[int, dict[str, Any]]:
    """The registered ``backend.generate`` instances of ``namespace``, by id."""
    return {
        each["value"]["instance_id"]: each["value"]
        for each in keys(etcd_url, f"v1/instances/{namespace}/backend/generate/").values()
    }


def revoke(etcd_url: str, lease: int) -> None:
    _post(f"{etcd_url}/v3/lease/revoke", {"ID": str(lease)})


def ask(frontend: str, model: str, max_tokens: int = 4, timeout: float = 30) -> tuple[int, Any]:
    """One chat completion: HTTP status and body (None unless JSON came)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me something."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    try:
        return 200, _post(f"{frontend}/v1/chat/completions", body, timeout)
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def models(frontend: str) -> list[str]:
    with urllib.request.urlopen(f"{frontend}/v1/models", timeout=10) as answer:
        return [each["id"] for each in json.load(answer)["data"]]


class Load:
    """``concurrency`` askers, each asking again as soon as it is answered, until the block ends."""

    def __init__(self, frontend: str, model: str, concurrency: int, max_tokens: int) -> None:
        self._pool = ThreadPoolExecutor(concurrency)
        self._stopped = False
        self.statuses: list[int] = []

        def asker() -> None:
            while not self._stopped:
                self.statuses.append(ask(frontend, model, max_tokens)[0])

        self._askers: list[Future[None]] = [self._pool.submit(asker) for _ in range(concurrency)]

    def stop(self) -> None:
        self._stopped = True
        for asker in self._askers:
            asker.result(60)
        self._pool.shutdown()


def frontend_command(python: str, port: int, variables: Mapping[str, str]) -> list[str]:
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
            "--discovery-backend", "etcd"]  # fmt: skip


def _post(url: str, body: Any, timeout: float = 10) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def inherited() -> dict[str, str]:
    """This process's environment without what would reach a worker by accident."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("DYN", "SNAPSHOT", "MOCKER"))}
