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
    Reason.DISK_FAILED: Explanation(
        "The disk refused to be read or written, though it has space.",
        "The message names the file and the kernel's error; `dmesg` says more. Work goes on once it can be written.",
    ),
    Reason.RUNTIME_DIR_IN_USE: Explanation(
        "Another process of this project works in the runtime folder; nothing was started.",
        "Stop that one, or name another folder: `agent.runtime_dir`, or --runtime-dir.",
    ),
    Reason.FILE_IN_USE: Explanation(
        "Another process adds to the file that a command was to fill; nothing was started and nothing lost.",
        "Wait until that one is done, end it, or name another file with --json.",
    ),
    Reason.STATE_CORRUPT: Explanation(
        "A file that the fleet's parts keep their state in cannot be understood.",
        "Run one version of this project on a host. The message names the file, and what it costs to remove it.",
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
    Reason.CUDA_MISSING: Explanation(
        "The NVIDIA driver's library or its Python bindings (cuda-python) cannot be loaded here.",
        "Install driver 570 or newer and `cuda-bindings`; `dynamo-snapshot doctor` says which is missing.",
    ),
    Reason.CUDA_PROBE_FAILED: Explanation(
        "The driver could not say whether a process uses CUDA, so nothing was frozen.",
        "The message has the driver's error. Check that agent and worker run under the same driver.",
    ),
    Reason.CUDA_LOCK_TIMEOUT: Explanation(
        "A CUDA process did not come to rest in time; every process of its tree runs on.",
        "Let the engine finish its work before it says ready-for-snapshot, or raise the lock time-out.",
    ),
    Reason.CUDA_CHECKPOINT_FAILED: Explanation(
        "The driver could not move a process's GPU memory to the host; its tree was brought back to running.",
        "The message has the driver's error. Host memory must hold what is left on the GPU.",
    ),
    Reason.CUDA_RESTORE_FAILED: Explanation(
        "The driver could not bring a restored process back onto the GPU; the replica was ended.",
        "The fleet tries again, then cold-starts; a snapshot that keeps failing is quarantined.",
    ),
    Reason.CUDA_HELPER_DIED: Explanation(
        "The node's CUDA helper process ended during a call; what it was doing counts as failed.",
        "It is started again by the next call; its last lines stand in the message.",
    ),
    Reason.COLLECTIVE_ALIVE: Explanation(
        "A communicator (NCCL) was alive at capture: such a snapshot could be made but never restored.",
        "Quiesce must destroy communicators; the engine makes them anew after the restore.",
    ),
    Reason.DRIVER_MISMATCH: Explanation(
        "The snapshot was made under another NVIDIA driver; it was refused before CRIU ran.",
        "Use a node with that driver, or let the next cold start here be captured.",
    ),
    Reason.GPU_COUNT_MISMATCH: Explanation(
        "The snapshot needs another number of GPUs than it was given.",
        "Give the replica as many GPUs as the message names.",
    ),
    Reason.GPU_MODEL_MISMATCH: Explanation(
        "The snapshot was made on another GPU model or memory size; the driver restores only onto the same.",
        "Use a node with the GPU that the message names.",
    ),
    Reason.GPU_OUT_OF_MEMORY: Explanation(
        "The GPU has less free memory than the snapshot needs; it was refused before CRIU ran.",
        "Drain or park a replica there. The message has both figures.",
    ),
    Reason.GPU_UUID_UNMAPPED: Explanation(
        "The device map does not say where one of the snapshot's GPUs goes, or names a GPU that is not here.",
        "Map each of the snapshot's GPUs to one of this node's, each once.",
    ),
    Reason.MIG_UNSUPPORTED: Explanation(
        "A GPU is in MIG mode, which the driver's checkpoint does not support.",
        "Use GPUs that are not partitioned.",
    ),
    Reason.LOADER_DIED: Explanation(
        "The GPU's weight loader ended; its loads are lost and their memory is free again.",
        "It is started again; workers that waited for it load their weights themselves.",
    ),
    Reason.WEIGHTS_CORRUPT: Explanation(
        "A weight segment is missing, truncated, or does not have its digest.",
        "Remove the snapshots that use it; the next cold start writes it anew.",
    ),
    Reason.WEIGHTS_LOAD_FAILED: Explanation(
        "Weights could not be brought onto the GPU.",
        "The message has the read's or the driver's error.",
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
