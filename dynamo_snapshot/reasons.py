"""What each reason code means and what to do: the source of ``docs/reasons.md``."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_snapshot.model import Reason


class Explanation(NamedTuple):
    meaning: str
    remedy: str


EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.CONFIGURATION_INVALID: Explanation(
        "A configuration file or option is wrong; nothing was started.",
        "The message names file, line, field and what was expected.",
    ),
    Reason.CRIU_MISSING: Explanation(
        "No criu was found where the configuration, DYNAMO_SNAPSHOT_CRIU, the installation and PATH point.",
        "Run `dynamo-snapshot install-criu`, or name one with --criu.",
    ),
    Reason.CRIU_TOO_OLD: Explanation(
        "The criu found cannot dump or restore a probe process on this kernel.",
        "CRIU 4.2 or newer is needed on Linux 6.16 and later: `dynamo-snapshot install-criu` unpacks one.",
    ),
    Reason.NOT_PRIVILEGED: Explanation(
        "The agent lacks the rights to make namespaces or to run CRIU.",
        "Run it as root, or with CAP_SYS_ADMIN, CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE.",
    ),
    Reason.PORT_IN_USE: Explanation(
        "A TCP port that is needed is taken.", "Stop what listens there, or choose another port in fleet.yaml."
    ),
    Reason.SERVER_UNREACHABLE: Explanation(
        "etcd, NATS or the bus did not answer in time.",
        "Check that the server runs and that its URL is right; the fleet goes on by itself once it answers.",
    ),
    Reason.PROCESS_DIED: Explanation(
        "A supervised process ended when it should not have.",
        "It is started again; its log under the runtime folder says why it ended.",
    ),
    Reason.DISK_FULL: Explanation(
        "There is not enough space for a capture or a restore; nothing half-written was kept.",
        "Free space, lower `snapshot.keep`, or set `agent.store_dir` to a larger file system.",
    ),
    Reason.DEADLINE_EXCEEDED: Explanation(
        "An order was not done by its deadline and was given up.",
        "The order's phases show where the time went; raise the pool's deadline if that is normal there.",
    ),
    Reason.CANCELLED: Explanation("The fleet withdrew the order before it was done.", "Nothing: demand had fallen."),
    Reason.STALE_FENCE: Explanation(
        "The order was written by a controller that has been superseded.",
        "Nothing: the current controller's orders are carried out.",
    ),
    Reason.UNKNOWN_REPLICA: Explanation(
        "The order names a replica that this node does not have.",
        "Nothing: the fleet takes it for gone and orders another.",
    ),
    Reason.AGENT_RESTARTED: Explanation(
        "The agent ended while it carried out the order; what was half-made has been cleaned up.",
        "Nothing: the fleet orders again. If it repeats, the agent's log says why it ended.",
    ),
    Reason.NODE_AT_CAPACITY: Explanation(
        "The node already has as many replicas as it may.", "Raise `agent.max_replicas`, or add nodes."
    ),
    Reason.WORKER_NOT_READY: Explanation(
        "A capture was wanted of a worker that is not ready-for-snapshot.",
        "Wait until `status` shows it as ready_for_snapshot.",
    ),
    Reason.DISCOVERABLE_AT_CAPTURE: Explanation(
        "The worker is registered or holds a connection to the outside, so its clones would share an identity.",
        "Start it through the worker hooks; the message names the socket, thread or key.",
    ),
    Reason.CRIU_DUMP_FAILED: Explanation(
        "CRIU could not dump the worker. The worker goes on serving.",
        "The message has CRIU's first error; the guard's findings usually name the file or socket behind it.",
    ),
    Reason.CRIU_RESTORE_FAILED: Explanation(
        "CRIU could not restore the snapshot. The replica was removed.",
        "The fleet tries again, then cold-starts; a snapshot that keeps failing is quarantined.",
    ),
    Reason.HOLDER_FAILED: Explanation(
        "The replica's holder did not start or ended early.",
        "Check that namespaces and mounts are allowed: `dynamo-snapshot doctor`.",
    ),
    Reason.PHASE_TIMED_OUT: Explanation(
        "A phase of a pipeline exceeded its deadline and was killed; all it had made was removed.",
        "The message names the phase; `agent.deadlines` sets its limit.",
    ),
    Reason.WORKER_EXITED: Explanation(
        "The worker ended before it had registered.", "Its log and its own reason say why; both stand in the message."
    ),
    Reason.SNAPSHOT_MISSING: Explanation(
        "No such snapshot is published.", "`dynamo-snapshot snapshots ls` lists those that are."
    ),
    Reason.SNAPSHOT_CORRUPT: Explanation(
        "A file of the snapshot is missing, truncated, or does not have its digest; it was refused before CRIU ran.",
        "Remove it with `dynamo-snapshot snapshots rm`; the next cold start is captured anew.",
    ),
    Reason.SNAPSHOT_CHANGED: Explanation(
        "A file's inode, size or times changed since this node digested it; it was refused before CRIU ran.",
        "`dynamo-snapshot snapshots verify` digests it again and admits it if it is whole.",
    ),
    Reason.SNAPSHOT_INCOMPATIBLE: Explanation(
        "The snapshot was made of another engine, model, configuration, kernel, CPU or CRIU than is wanted here.",
        "The message names what differs. The next cold start is captured under the new key.",
    ),
    Reason.SNAPSHOT_IN_USE: Explanation(
        "The snapshot is being restored or verified and cannot be removed.", "Try again when that has ended."
    ),
    Reason.SNAPSHOT_QUARANTINED: Explanation(
        "Restores of this snapshot failed several times in a row, so it is not used any more.",
        "Look at the failed orders' messages; remove the snapshot to have a new one captured.",
    ),
    Reason.INTERNAL_ERROR: Explanation(
        "A fault in this program.", "Please report it with the message and the log around it."
    ),
}
"""Every :class:`Reason`; a test fails when one is missing."""
