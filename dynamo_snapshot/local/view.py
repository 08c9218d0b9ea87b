"""How a fleet looks in a terminal: tables drawn from a :class:`FleetView`, live, or lines where nobody watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dynamo_snapshot.local.observe import STALE_AFTER_S, FleetView
from dynamo_snapshot.local.service import ServiceState
from dynamo_snapshot.model import PoolStatus, ReplicaState, ReplicaStatus

LINES = 8
"""How many of the newest lines and decisions the live view shows."""

# A letter beside each colour: the view must work without colours too.
STATE_STYLES = {
    ReplicaState.ORDERED: ("○", "dim"),
    ReplicaState.STARTING: ("◔", "yellow"),
    ReplicaState.RESTORING: ("◑", "yellow"),
    ReplicaState.PARKED: ("◒", "blue"),
    ReplicaState.RESUMING: ("◕", "cyan"),
    ReplicaState.SERVING: ("●", "green"),
    ReplicaState.DRAINING: ("◌", "magenta"),
    ReplicaState.STOPPED: ("·", "dim"),
    ReplicaState.FAILED: ("✗", "bold red"),
}


def render(view: FleetView, lines: Iterable[str] = ()) -> RenderableType:
    """Returns what there is to see: pools, replicas, decisions, services and the last ``lines``."""
    parts: list[RenderableType] = []
    status = view.status
    if status is None:
        parts.append(Text("no fleet status yet", style="dim"))
    else:
        if view.status_age_s is not None and view.status_age_s > STALE_AFTER_S:
            parts.append(Text(f"the status is {duration(view.status_age_s)} old: the controller is down", "bold red"))
        if not status.discovery_known:
            parts.append(Text("discovery cannot be read: counts are the last known ones", "bold red"))
        parts.append(_pools(view))
        parts.append(_replicas(view))
        if status.decisions:
            parts.append(_decisions(view))
    if view.services:
        parts.append(_services(view))
    shown = list(lines)[-LINES:]
    if shown:
        parts.append(Text("\n".join(shown), style="dim"))
    title = f"fleet {status.fleet}" if status is not None else "fleet"
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def duration(seconds: float) -> str:
    """``seconds`` for a person: 0.4 s, 12 s, 3 min 20 s."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else str(timedelta(seconds=int(seconds)))


def state_changes(before: FleetView | None, after: FleetView) -> list[str]:
    """What is new in ``after``, one line each: for those who read a log instead of watching."""
    if after.status is None:
        return []
    old_status = before.status if before is not None else None
    old = {replica.replica_id: replica for replica in old_status.replicas} if old_status else {}
    lines = []
    for replica in after.status.replicas:
        was = old.get(replica.replica_id)
        if was is None or was.state is not replica.state:
            reason = f": {replica.reason}" if replica.reason else ""
            lines.append(f"replica {replica.replica_id} ({replica.pool}, {replica.way}) {replica.state}{reason}")
    known = {(decision.at, decision.what) for decision in old_status.decisions} if old_status else set()
    lines += [
        f"decision for {decision.pool}: {decision.what} ({decision.reason})"
        for decision in after.status.decisions
        if (decision.at, decision.what) not in known
    ]
    return lines


class Terminal(Console):
    """Standard output, whose reader may go, as in ``| head``: what is printed from then on goes nowhere."""

    on_reader_gone: Callable[[], None] = staticmethod(lambda: None)
    """Called once, when it is found gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # The buffer is not empty, and is flushed again when this process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        self.on_reader_gone()


class LiveView:
    """Shows views and lines as they come: redrawn in place in a terminal, else one line for each thing that changed."""

    def __init__(self, console: Console, *, plain: bool = False) -> None:
        self._console = console
        self._began = time.monotonic()
        self._lines: list[str] = []
        self._view: FleetView | None = None
        live = console.is_terminal and not plain
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if live else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f}  {text}"
        self._lines = [*self._lines[-LINES:], line]
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        else:
            self._draw()

    def show(self, view: FleetView) -> None:
        before, self._view = self._view, view
        if self._live is None:
            for line in state_changes(before, view):
                self.say(line)
        else:
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        view = self._view if self._view is not None else FleetView(at=time.time())
        self._live.update(render(view, self._lines), refresh=True)


def _pools(view: FleetView) -> RenderableType:
    assert view.status is not None
    table = _table("pool", "role", "target", "serving", "pending", "parked", "draining", "snapshot", "")
    for pool in view.status.pools:
        limit = ""
        if pool.achievable < pool.target:
            limit = f"at most {pool.achievable}: {pool.unachievable_reason or 'unknown'}"
        table.add_row(
            pool.pool, pool.role, str(pool.target), str(pool.serving), str(pool.pending), _parked(pool),
            str(pool.draining), pool.snapshot_id or "none", Text(limit, "bold red"),
        )  # fmt: skip
    parts: list[RenderableType] = [table]
    if view.planner is not None:
        parts.append(Text(f"planner: {view.planner}", "dim"))
    if view.requests_per_s is not None:
        parts.append(Text(f"{view.requests_per_s:.1f} requests a second", "dim"))
    return Group(*parts)


def _parked(pool: PoolStatus) -> str:
    return f"{pool.parked} of {pool.parked_target}" if pool.parked or pool.parked_target else ""


def _replicas(view: FleetView) -> RenderableType:
    assert view.status is not None
    table = _table("replica", "pool", "state", "for", "way", "running", "queued", "instance", "")
    for replica in view.status.replicas:
        load = replica.load
        table.add_row(
            replica.replica_id, replica.pool, _state(replica), duration(view.at - replica.since), replica.way,
            str(load.running) if load else "", str(load.queued) if load else "",
            f"{replica.instance_id:x}" if replica.instance_id is not None else "", replica.reason or "",
        )  # fmt: skip
    return table if table.row_count else Text("no replicas", style="dim")


def _state(replica: ReplicaStatus) -> Text:
    mark, style = STATE_STYLES[replica.state]
    return Text(f"{mark} {replica.state}", style)


def _decisions(view: FleetView) -> RenderableType:
    assert view.status is not None
    table = _table("ago", "pool", "decision", "because")
    for decision in view.status.decisions[-LINES:]:
        table.add_row(duration(view.at - decision.at), decision.pool, decision.what, decision.reason)
    return table


def _services(view: FleetView) -> RenderableType:
    text = Text()
    for service in view.services:
        good = service.state is ServiceState.READY
        text.append(f"{'●' if good else '◌'} {service.name}", "green" if good else "bold red")
        if not good:
            text.append(f" {service.state} {service.detail}".rstrip(), "red")
        if service.restarts:
            text.append(f" ({service.restarts} restarts)", "yellow")
        text.append("   ")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    numbers = {"target", "serving", "pending", "parked", "draining", "running", "queued", "for", "ago"}
    for column in columns:
        # Where it is narrow these break, so that short words stay whole.
        long = column in {"snapshot", "instance", "decision", "because", ""}
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold", no_wrap=not long)
    return table
