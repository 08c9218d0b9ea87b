"""What a fleet's replicas occupy on this host while they run, to be looked for when they have gone."""

from __future__ import annotations

from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.local.leftovers import namespace
from dynamo_snapshot.model import Reported


class Footprint:
    """The namespaces and TCP ports that reported replicas have had since the fleet began."""

    def __init__(self) -> None:
        self.namespaces: set[int] = set()
        self.ports: set[int] = set()

    async def follow(self, bus: Bus) -> None:
        """Takes in every report until cancelled."""
        async for reported in bus.watch_reported():
            self.take(reported)

    def take(self, reported: Reported) -> None:
        own = {namespace(1, "pid"), namespace(1, "mnt"), None}
        for replica in reported.replicas:
            self.ports.add(replica.rpc_port)
            if replica.pid is not None:
                for kind in ("pid", "mnt"):
                    found = namespace(replica.pid, kind)
                    if found is not None and found not in own:
                        self.namespaces.add(found)
