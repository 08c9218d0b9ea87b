"""Dynamo's own planner classes, fed with a simulation's signals as its connectors would feed them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dynamo_snapshot.replay.policies.engine_facts import EngineFacts
from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import EngineSample


class Planner:
    """The orchestrator, its clock and its event loop behind one call a tick.

    Raises:
        ImportError: where ai-dynamo's planner is not installed.
    """

    def __init__(self, options: dict[str, Any], facts: EngineFacts, min_replicas: int, max_replicas: int) -> None:
        from dynamo.planner.config.planner_config import PlannerConfig
        from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities
        from dynamo.planner.plugins.clock import VirtualClock
        from dynamo.planner.plugins.orchestrator.engine_adapter import OrchestratorEngineAdapter

        # A simulation has no operator to warn: every tick would repeat what the settings already say.
        logging.getLogger("dynamo.planner").setLevel(logging.ERROR)
        config = PlannerConfig(
            environment="virtual",
            namespace="simulation",
            backend="mocker",
            mode="agg",
            min_endpoint=min_replicas,
            max_gpu_budget=max_replicas,
            decode_engine_num_gpu=1,
            live_dashboard_port=0,
            control_api_port=0,
            metric_reporting_prometheus_port=0,
            report_interval_hours=None,
            **options,
        )
        engine = EngineCapabilities(
            num_gpu=1,
            max_num_batched_tokens=facts.timing.max_batched_tokens,
            max_num_seqs=facts.timing.max_requests,
            max_kv_tokens=facts.timing.kv_tokens,
            context_length=facts.timing.kv_tokens,
        )
        self._engine = OrchestratorEngineAdapter(config, WorkerCapabilities(decode=engine), clock=VirtualClock())
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._engine.bootstrap_plugins())
        if config.optimization_target == "sla":
            self._engine.install_regressions_from_fpms(agg_fpms=_profile(facts))
        self._due = self._engine.initial_tick(0.0)
        self._traffic = _Traffic()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None:
            loop.close()

    def tick(self, signals: Signals) -> int | None:
        from dynamo.planner.core.types import FpmObservations, TickInput

        self._traffic.add(signals)
        if signals.now < self._due.at_s - 1e-6:
            return None
        due = self._due
        metrics = {
            (sample.worker_id, sample.dp_rank): forward_pass_metrics(sample) for sample in signals.observation.samples
        }
        effects = self._loop.run_until_complete(
            self._engine.tick(
                due,
                TickInput(
                    now_s=signals.now,
                    traffic=self._traffic.take() if due.need_traffic_metrics else None,
                    worker_counts=_counts(signals) if due.need_worker_states else None,
                    fpm_observations=FpmObservations(decode=metrics) if due.need_worker_fpm else None,
                ),
            )
        )
        self._due = effects.next_tick
        decision = effects.scale_to
        return None if decision is None or decision.num_decode is None else int(decision.num_decode)


class _Traffic:
    """The traffic since it was last taken, as the planner's Prometheus queries tell it."""

    def __init__(self) -> None:
        self._since = self._now = 0.0
        self._requests = self._input = self._finished = self._output = 0
        self._lengths = (0.0, 0.0)

    def add(self, signals: Signals) -> None:
        self._now = signals.now
        self._requests += signals.arrivals
        self._input += signals.input_tokens
        self._finished += signals.finished
        self._output += signals.output_tokens

    def take(self) -> Any:
        from dynamo.planner.core.types import TrafficObservation

        input_length, output_length = self._lengths
        if self._requests:
            input_length = self._input / self._requests
        if self._finished:
            output_length = self._output / self._finished
        self._lengths = (input_length, output_length)
        taken = TrafficObservation(
            duration_s=self._now - self._since,
            num_req=float(self._requests),
            isl=input_length,
            osl=output_length,
        )
        self._since = self._now
        self._requests = self._input = self._finished = self._output = 0
        return taken


def _counts(signals: Signals) -> Any:
    """What the Kubernetes connector says: replicas that only start are pending, any other change is unstable."""
    from dynamo.planner.core.types import WorkerCounts

    stable = signals.starting == 0 and signals.draining == 0
    return WorkerCounts(
        ready_num_decode=signals.ready,
        expected_num_decode=signals.ready if stable else None,
        decode_scaling_in_progress=not stable,
        pending_num_decode=signals.starting if signals.draining == 0 else 0,
    )


def forward_pass_metrics(sample: EngineSample) -> Any:
    """One engine's metrics as Dynamo's own ``ForwardPassMetrics``; unknown is 0, as the simulator knows all."""
    from dynamo.common.forward_pass_metrics import (
        ForwardPassMetrics,
        QueuedRequestMetrics,
        ScheduledRequestMetrics,
    )

    decoding = int(sample.decode_requests or 0)
    return ForwardPassMetrics(
        worker_id=sample.worker_id,
        dp_rank=sample.dp_rank,
        counter_id=sample.sequence,
        wall_time=sample.pass_s or 0.0,
        scheduled_requests=ScheduledRequestMetrics(
            num_prefill_requests=max(0, int(sample.running or 0) - decoding),
            sum_prefill_tokens=int(sample.prefill_tokens or 0),
            sum_prefill_kv_tokens=int(sample.prefill_kv_tokens or 0),
            num_decode_requests=decoding,
            sum_decode_kv_tokens=int(sample.decode_kv_tokens or 0),
        ),
        queued_requests=QueuedRequestMetrics(
            num_prefill_requests=int(sample.queued or 0),
            sum_prefill_tokens=int(sample.queued_tokens or 0),
        ),
    )


def _profile(facts: EngineFacts) -> list[Any]:
    """Forward passes over the engine's range, as profiling before a deployment measures them."""
    timing = facts.timing
    passes = []
    for step in range(6):
        for load in range(6):
            prefill, requests, context = (
                timing.max_batched_tokens * step // 5,
                timing.max_requests * load // 10,
                timing.kv_tokens * load // 10,
            )
            if prefill or requests:
                sample = EngineSample(
                    "profile",
                    0,
                    sequence=0,
                    running=requests + min(prefill, 1),
                    queued=0,
                    pass_s=facts.pass_s(prefill, context),
                    prefill_tokens=prefill,
                    decode_requests=requests,
                    decode_kv_tokens=context,
                )
                passes.append(forward_pass_metrics(sample))
    return passes
