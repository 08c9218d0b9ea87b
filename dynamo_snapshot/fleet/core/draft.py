"""A step's working copy of the state: rules read and write it; :meth:`Draft.finish` makes it a value again."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dynamo_snapshot.fleet import identity
from dynamo_snapshot.fleet.core.lifecycle import Happening, advance, legal
from dynamo_snapshot.fleet.core.messages import Command, PublishStatus, Remember, SetWanted
from dynamo_snapshot.fleet.core.rules import PoolRules
from dynamo_snapshot.fleet.core.state import Node, PoolState, Replica, State
from dynamo_snapshot.model import DecisionRecord, Order, OrderKind, Wanted

RECORDS_KEPT = 50


class Draft:
    """Owned by one call of ``step``; never leaves it."""

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.rules = state.rules
        self.now = now
        self.state = state
        self.pools = dict(state.pools)
        self.nodes = dict(state.nodes)
        self.replicas = dict(state.replicas)
        self.records = list(state.records)
        self.commands: list[Command] = []
        self.announce: set[str] = set()
        """Nodes whose wanted list is written even if no order changed."""

    def set(self, **changes: Any) -> None:
        """Changes fields of the state other than pools, nodes, replicas and records."""
        self.state = replace(self.state, **changes)

    # Pools

    def pool_rules(self, pool: str) -> PoolRules:
        return self.rules.pools[pool]

    def set_pool(self, pool: str, **changes: Any) -> PoolState:
        self.pools[pool] = replace(self.pools[pool], **changes)
        return self.pools[pool]

    def record(self, pool: str, what: str, reason: str) -> None:
        """Notes a change of target or a way chosen, for people."""
        self.records.append(DecisionRecord(at=self.now, pool=pool, what=what, reason=reason))

    # Replicas

    def set_replica(self, replica_id: str, **changes: Any) -> Replica:
        self.replicas[replica_id] = replace(self.replicas[replica_id], **changes)
        return self.replicas[replica_id]

    def move(self, replica_id: str, happening: Happening, **changes: Any) -> Replica:
        """Carries out a transition of the table, with the fields that go with it."""
        replica = self.replicas[replica_id]
        following = advance(replica.state, happening)
        if following is not replica.state:
            changes.setdefault("since", self.now)
        return self.set_replica(replica_id, state=following, **changes)

    def may(self, replica_id: str, happening: Happening) -> bool:
        return legal(self.replicas[replica_id].state, happening)

    def remove(self, replica_id: str) -> None:
        """Nothing of the replica is left: closes its orders and forgets it."""
        replica = self.move(replica_id, Happening.GONE)
        for order in (replica.start_order, replica.capture_order, replica.stop_order):
            self.withdraw(replica.node, order)
        del self.replicas[replica_id]

    # Orders

    def next_serial(self) -> int:
        self.set(serial=self.state.serial + 1)
        return self.state.serial

    def issue(self, kind: OrderKind, replica: Replica, seconds: float, reason: str, **extra: Any) -> Order:
        """Puts one more order into the wanted list of the replica's node."""
        return self.issue_to(replica.node, kind, replica.id, replica.pool, seconds, reason, **extra)

    def issue_to(
        self, node_name: str, kind: OrderKind, replica_id: str, pool: str, seconds: float, reason: str, **extra: Any
    ) -> Order:
        """Likewise, of a node."""
        order = Order(
            id=identity.order_id(self.state.fence, self.next_serial()),
            kind=kind,
            replica_id=replica_id,
            pool=pool,
            fence=self.state.fence,
            issued_at=self.now,
            deadline=self.now + seconds,
            reason=reason,
            **extra,
        )
        node = self.nodes[node_name]
        self.nodes[node_name] = replace(node, orders=(*node.orders, order))
        return order

    def withdraw(self, node_name: str, order_id: str | None) -> None:
        """Takes an order out of the wanted list; None, or one that is not there, is nothing to do."""
        node = self.nodes[node_name]
        if order_id is not None:
            self.nodes[node_name] = replace(node, orders=tuple(order for order in node.orders if order.id != order_id))

    def alive(self, pool: str) -> list[Replica]:
        """The replicas that count towards the target of ``pool``, oldest first."""
        return [replica for replica in self.replicas.values() if replica.pool == pool and replica.counts]

    def spares(self, pool: str) -> list[Replica]:
        """The replicas of ``pool`` that are parked or on their way there, oldest first."""
        return [replica for replica in self.replicas.values() if replica.pool == pool and replica.spare]

    def heard(self) -> list[Node]:
        """The nodes that have reported lately: only these get new work."""
        return [node for node in self.nodes.values() if node.is_heard(self.now, self.rules.node_silent_s)]

    def occupied(self, node: str) -> int:
        """Replicas that take up ``node``, in whatever state."""
        return sum(replica.node == node for replica in self.replicas.values())

    # The end

    def finish(self) -> tuple[State, tuple[Command, ...]]:
        """Returns the new state and the commands: wanted lists first, as they are what is waited for."""
        lists: list[Command] = [self._write(node) for node in list(self.nodes.values()) if self._changed(node)]
        memory = replace(
            self.state.memory,
            targets={name: pool.target for name, pool in self.pools.items() if pool.decided},
            decision=self.state.decision,
        )
        if memory != self.before.memory:
            self.commands.insert(0, Remember(memory=memory))
        state = replace(
            self.state,
            memory=memory,
            pools=self.pools,
            nodes=self.nodes,
            replicas=self.replicas,
            records=tuple(self.records[-RECORDS_KEPT:]),
        )
        commands = [*lists, *self.commands]
        if replace(state, loads={}) != replace(self.before, loads={}):
            commands.append(PublishStatus())
        return state, tuple(commands)

    def _changed(self, node: Node) -> bool:
        known = self.before.nodes.get(node.name)
        return node.name in self.announce or known is None or known.orders != node.orders

    def _write(self, node: Node) -> SetWanted:
        node = self.nodes[node.name] = replace(node, sequence=node.sequence + 1)
        return SetWanted(
            wanted=Wanted(
                node=node.name,
                fence=self.state.fence,
                sequence=node.sequence,
                workers={name: pool.worker for name, pool in self.rules.pools.items()},
                orders=node.orders,
            )
        )
