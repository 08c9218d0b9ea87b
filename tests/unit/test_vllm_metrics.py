"""Forward-pass metrics across a capture, against a stand-in of Dynamo's scheduler and its publisher."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from support.engine_conformance import put_modules

from worker_hooks.engines import vllm_metrics
from worker_hooks.engines.vllm_metrics import PORT_ENV, PORTS, SCHEDULERS, ForwardPassMetrics, choose_port, free_port
from worker_hooks.reasons import HookError, HookReason


class ZmqError(Exception):
    """As ZeroMQ's: no OSError, but with its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.errno = number


@dataclass
class Publisher:
    """As Dynamo's: listens from its making on."""

    endpoint: str
    worker_id: str
    dp_rank: int
    start_paused: bool = False
    is_open: bool = True
    resumed: bool = False
    _worker_id: str = field(init=False)

    broken: ClassVar[Sequence[int]] = ()
    """Error numbers of the next ones that are made."""

    def __post_init__(self) -> None:
        self._worker_id = self.worker_id
        if Publisher.broken:
            number, *Publisher.broken = Publisher.broken
            raise ZmqError(number)

    def shutdown(self) -> None:
        assert self.is_open, "shut down twice"
        self.is_open = False

    def resume(self) -> None:
        self.resumed = True


class InstrumentedScheduler:
    def __init__(self, rank: int) -> None:
        self._fpm_worker_id, self._fpm_dp_rank = "", rank
        self._publisher = Publisher("tcp://*:20380", worker_id="", dp_rank=rank)


InstrumentedScheduler.__module__ = SCHEDULERS


class Config:
    """As vLLM's ``SchedulerConfig``."""

    def __init__(self, scheduler_cls: Any) -> None:
        self.scheduler_cls = scheduler_cls

    def get_scheduler_cls(self) -> Any:
        return self.scheduler_cls


@pytest.fixture(autouse=True)
def dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "broken", ())
    names = {"InstrumentedScheduler": InstrumentedScheduler, "_FpmPublisherThread": Publisher}
    put_modules(monkeypatch, {SCHEDULERS: names})


def followed(rank: int = 0) -> tuple[ForwardPassMetrics, Any]:
    metrics, config = ForwardPassMetrics(), Config(InstrumentedScheduler)
    metrics.follow(config)
    return metrics, config.get_scheduler_cls()(rank)


def port_of(scheduler: Any) -> int:
    return int(scheduler._publisher.endpoint.rpartition(":")[2])


def test_the_scheduler_is_dynamo_s_and_known_by_its_name() -> None:
    _, scheduler = followed()
    assert isinstance(scheduler, InstrumentedScheduler)
    assert (type(scheduler).__name__, type(scheduler).__module__) == ("InstrumentedScheduler", SCHEDULERS)
    assert scheduler._publisher.is_open


def test_nothing_listens_after_the_close_and_another_port_after_the_reopening() -> None:
    metrics, scheduler = followed()
    first = scheduler._publisher
    metrics.close()
    metrics.close()
    assert not first.is_open
    port = metrics.reopen()
    assert port == port_of(scheduler)
    assert port in PORTS
    assert scheduler._publisher.endpoint.startswith("tcp://127.0.0.1:")
    assert scheduler._publisher.is_open


def test_it_is_silent_until_it_has_a_name() -> None:
    metrics, scheduler = followed()
    metrics.close()
    metrics.reopen()
    assert scheduler._publisher.start_paused
    assert not scheduler._publisher.resumed
    metrics.speak_as("17")
    assert scheduler._publisher.resumed
    assert (scheduler._fpm_worker_id, scheduler._publisher._worker_id) == ("17", "17")


def test_one_that_was_never_closed_is_replaced_too() -> None:
    metrics, scheduler = followed()
    first = scheduler._publisher
    metrics.reopen()
    assert not first.is_open
    metrics.close()
    assert not scheduler._publisher.is_open


def test_the_port_is_given_without_the_rank_that_dynamo_adds() -> None:
    metrics, scheduler = followed(rank=3)
    assert metrics.reopen() == port_of(scheduler) - 3
    assert scheduler._publisher.dp_rank == 3


def test_a_port_that_was_taken_meanwhile_is_not_insisted_on() -> None:
    metrics, scheduler = followed()
    Publisher.broken = (errno.EADDRINUSE, errno.EADDRINUSE)
    assert metrics.reopen() == port_of(scheduler)
    Publisher.broken = (errno.EADDRINUSE,) * 3
    with pytest.raises(ZmqError):
        metrics.reopen()
    Publisher.broken = (errno.EMFILE,)
    with pytest.raises(ZmqError):
        metrics.reopen()


def test_a_scheduler_of_another_kind_has_no_metrics() -> None:
    class Scheduler:
        pass

    metrics, config = ForwardPassMetrics(), Config(Scheduler)
    metrics.follow(config)
    assert config.scheduler_cls is Scheduler
    metrics.close()
    assert metrics.reopen() is None
    metrics.speak_as("17")


def test_a_class_derived_from_dynamo_s_has_them() -> None:
    class Derived(InstrumentedScheduler):
        pass

    metrics, config = ForwardPassMetrics(), Config(Derived)
    metrics.follow(config)
    config.get_scheduler_cls()(0)
    assert metrics.reopen() is not None


@pytest.mark.parametrize("name", ["InstrumentedScheduler", "_FpmPublisherThread"])
def test_a_name_that_dynamo_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(sys.modules[SCHEDULERS], name)
    with pytest.raises(HookError, match=name) as refused:
        ForwardPassMetrics().follow(Config(InstrumentedScheduler))
    assert refused.value.reason is HookReason.SYMBOLS_MISSING


@pytest.mark.parametrize("name", ["_publisher", "_fpm_worker_id", "_fpm_dp_rank", "_publisher._worker_id"])
def test_an_attribute_that_the_scheduler_lacks_is_refused(name: str) -> None:
    class Lacking(InstrumentedScheduler):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            owner, _, attribute = name.rpartition(".")
            delattr(getattr(self, owner) if owner else self, attribute)

    config = Config(Lacking)
    ForwardPassMetrics().follow(config)
    with pytest.raises(HookError, match=name) as refused:
        config.get_scheduler_cls()(0)
    assert refused.value.reason is HookReason.SYMBOLS_MISSING


@pytest.mark.parametrize(("given", "chosen"), [("0", True), ("20380", False), (None, False)])
def test_a_port_is_chosen_only_where_none_in_particular_is_asked_for(given: str | None, chosen: bool) -> None:
    environ = {} if given is None else {PORT_ENV: given}
    choose_port(environ)
    assert (environ.get(PORT_ENV) != given) == chosen
    assert not chosen or int(environ[PORT_ENV]) in PORTS


def test_a_port_that_anybody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(vllm_metrics, "PORTS", range(port, port + 1))
        with pytest.raises(HookError, match="no port is free") as refused:
            free_port()
    assert refused.value.reason is HookReason.RESUME_FAILED
    assert free_port() == port
