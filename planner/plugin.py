"""The plugin as Dynamo's planner loads it in process: a PROPOSE plugin, method name = stage name.

    plugin_registration:
      in_process_plugins:
        - {module: planner.plugin, class: SnapshotScaling, plugin_id: snapshot-scaling, plugin_type: propose,
           priority: 1, needs: [observations.fpm, observations.workers], kwargs: {roles: {decode: {}}}}

``planner.config`` writes such a file. An answer always SETs, also to hold: where a plugin is silent,
Dynamo takes the number of ready workers for the target, and a dead worker would lower it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.collector import set_aside_what_stays
from planner.engine import engine_from_options
from planner.policy import Proposal


class SnapshotScaling:
    """Proposes how many replicas each role is to have; see :mod:`planner.policy` for the rules.

    Args:
        roles: ``{"decode": {knob: value}, "prefill": {…}}``, the knobs of :class:`planner.policy.LoadPolicy`.
        options: the other arguments of :func:`planner.engine.engine_from_options`.

    Raises:
        ValueError: naming what is wrong; the planner then does not start.
    """

    def __init__(self, roles: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        self._engine = engine_from_options(roles, **options)
        self._started = False

    async def Bootstrap(self, request: Any) -> Any:
        from dynamo.planner.plugins.types import BootstrapResponse

        await self._start()
        return BootstrapResponse(ok=True, message="snapshot scaling")

    async def Reset(self, request: Any) -> Any:
        from dynamo.planner.plugins.types import ResetResponse

        self._engine.reset()
        return ResetResponse(ok=True)

    async def Propose(self, request: Any) -> Any:
        await self._start()
        return response(self._engine.propose(request.context))

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._engine.start()
            set_aside_what_stays()


def response(proposals: Sequence[Proposal]) -> Any:
    """Returns the ProposeStageResponse for ``proposals``: SET with an AT_LEAST floor, or no opinion."""
    from dynamo.planner.plugins.types import (
        AcceptResult,
        ComponentTarget,
        OverrideResult,
        OverrideType,
        ProposeStageResponse,
    )

    targets = []
    for proposal in proposals:
        for replicas, kind in ((proposal.replicas, OverrideType.SET), (proposal.floor, OverrideType.AT_LEAST)):
            if replicas is not None:
                targets.append(ComponentTarget(sub_component_type=proposal.role.value, replicas=replicas, type=kind))
    if not targets:
        return ProposeStageResponse(accept=AcceptResult())
    reason = " | ".join(f"{proposal.role.value}: {proposal.reason}" for proposal in proposals)
    return ProposeStageResponse(override=OverrideResult(targets=targets, reason=reason))
