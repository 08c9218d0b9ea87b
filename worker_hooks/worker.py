"""``dynamo-snapshot-worker``: runs a Dynamo worker under the hooks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from worker_hooks.hooks import Hooks, leave, run
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.seccomp import block_io_uring, io_uring_blocked

USAGE_STATUS = 2
"""The exit status of a command that cannot run under the hooks: nothing was started."""

_HELP = """\
Runs COMMAND, a Dynamo worker, in this process and under the hooks: io_uring is blocked before the engine
starts, the worker registers in discovery only after its self-test, and where SNAPSHOT_CONTROL_DIR is set
it becomes ready for a snapshot first and registers when it is released.

  dynamo-snapshot-worker run -- python -m dynamo.mocker --model-path /models/tiny --model-name tiny
  dynamo-snapshot-worker run -- python -m dynamo.vllm --model /models/llama

dynamo.mocker is given what it lacks (docs/worker-hooks.md). Any other module has to speak the protocol of
dynamo.common.snapshot itself, as dynamo.vllm, dynamo.sglang and dynamo.trtllm do.

environment:
  SNAPSHOT_CONTROL_DIR             control directory; set: become ready for a snapshot before registering
  DYNAMO_SNAPSHOT_STATE_DIR        where worker-state.json is kept, whether or not a capture is wanted
  DYNAMO_SNAPSHOT_INCARNATION      this incarnation's name
  DYNAMO_SNAPSHOT_DRAIN_TIMEOUT_S  seconds for requests in flight after SIGTERM (default 30)
  MOCKER_BOOT_SECONDS              dynamo.mocker: simulated boot, in seconds
  MOCKER_RESIDENT_MIB              dynamo.mocker: real memory whose digest the self-test checks, in MiB
  DYNAMO_SNAPSHOT_GATE=off         dynamo.mocker: control run that registers before boot and self-test

exit status: 0 after an orderly drain; 1 with a reason in worker-state.json; 2 if COMMAND cannot run here.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns where nothing was started; a worker that ran ends the process."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        module, module_arguments = parse_command(arguments.command)
        if not io_uring_blocked():
            block_io_uring()
    except (HookError, OSError) as error:
        return _refuse(error)
    return leave(_run(module, module_arguments))


def _run(module: str, arguments: list[str]) -> int:
    hooks = Hooks.from_environment()
    if module in ("dynamo.mocker", "dynamo.mocker.main"):
        from worker_hooks.engines.mocker import run_mocker

        return _status(hooks, run(lambda hooks: run_mocker(hooks, arguments), hooks))
    from worker_hooks.engines.module import run_module

    return _status(hooks, run_module(hooks, module, arguments))


def parse_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """Takes ``python -m MODULE ARGUMENT...`` apart; raises ``command_invalid`` for anything else."""
    words = list(command)
    if words and words[0] == "--":
        del words[0]
    if len(words) < 3 or not Path(words[0]).name.startswith("python") or words[1] != "-m":
        raise HookError(HookReason.COMMAND_INVALID, f"cannot run {' '.join(words) or 'an empty command'}")
    if os.sep in words[0] and not _same_python(words[0]):
        raise HookError(
            HookReason.COMMAND_INVALID, f"{words[0]} is not the Python that runs the hooks ({sys.executable})"
        )
    return words[2], words[3:]


def _same_python(path: str) -> bool:
    """Whether ``path`` stands in the environment this interpreter runs in (its binary may be a link elsewhere)."""
    return Path(path).absolute().parent == Path(sys.executable).absolute().parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo-snapshot-worker",
        description="Runs a Dynamo worker so that it can be captured and restored.",
    )
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="run")
    run_parser = commands.add_parser(
        "run",
        help="run a worker under the hooks",
        usage="dynamo-snapshot-worker run -- python -m MODULE [ARGUMENT ...]",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="python -m MODULE [ARGUMENT ...]"
    )
    return parser


def _status(hooks: Hooks, status: int) -> int:
    """A worker that could not start for want of symbols was refused, not broken."""
    return USAGE_STATUS if hooks.lifecycle.snapshot.reason == HookReason.SYMBOLS_MISSING else status


def _refuse(error: Exception) -> int:
    print(f"dynamo-snapshot-worker: {error}", file=sys.stderr)
    return USAGE_STATUS


if __name__ == "__main__":
    sys.exit(main())
