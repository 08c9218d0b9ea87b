"""A new incarnation's own identity: its environment, and randomness that no other clone has.

A restored process has the memory of its source: the same variables, and random number generators in
the same state. Both are replaced before anything else happens. Child processes have copies of their own;
a child that wants to follow is given one end of a :class:`ChildLink` before the capture.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from worker_hooks.control import ControlDirectory, Release, RestoreContext
from worker_hooks.reasons import HookError, HookReason

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def read_context(control: ControlDirectory, release: Release) -> RestoreContext:
    """The restore context that belongs to ``release``.

    Raises:
        HookError: ``restore_context_missing``, ``restore_context_corrupt`` or ``incarnation_mismatch``.
    """
    context = control.read_restore_context()
    if context.incarnation and release.incarnation and context.incarnation != release.incarnation:
        raise HookError(
            HookReason.INCARNATION_MISMATCH,
            f"{control.path}: restore-complete names {release.incarnation}, "
            f"restore-context.json names {context.incarnation}",
        )
    return replace(context, incarnation=context.incarnation or release.incarnation)


def apply_environment(context: RestoreContext, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the context names, and unsets what it names with null."""
    for name, value in context.env.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def reseed() -> None:
    """New seeds, from the kernel, for ``random`` and, where loaded, for NumPy's and torch's global generators.

    Generators that a program made for itself are its own to replace (in its ``resume``).
    """
    random.seed(os.urandom(32))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(list(os.urandom(32)))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


LINKS: list[ChildLink] = []
"""Every link of this process that was made and not forgotten: whom a new identity is handed to."""


class ChildLink:
    """Carries a new identity to one child process, and its acknowledgement back.

    Made by the parent before it forks or spawns; ``child_end`` may be pickled to the child, which calls
    :func:`follow` with it. The pair is a Unix socket within the tree, so a capture carries it over.
    """

    def __init__(self, name: str) -> None:
        from multiprocessing import Pipe  # only workers with children need it

        self.name = name
        self._parent_end, self.child_end = Pipe()
        LINKS.append(self)

    def forget(self) -> None:
        """The child has ended: new identities are not for it."""
        LINKS.remove(self)
        self._parent_end.close()

    def push(self, context: RestoreContext, timeout_s: float) -> None:
        """Hands ``context`` over and waits until the child has applied it; raises ``child_silent`` otherwise."""
        try:
            self._parent_end.send((dict(context.env), context.incarnation))
            if self._parent_end.poll(timeout_s) and self._parent_end.recv() == context.incarnation:
                return
        except (OSError, EOFError) as error:
            raise HookError(HookReason.CHILD_SILENT, f"child {self.name} is gone: {error!r}") from error
        raise HookError(HookReason.CHILD_SILENT, f"child {self.name} did not answer within {timeout_s:g} s")


def hand_on(context: RestoreContext, timeout_s: float) -> None:
    """Gives ``context`` to every child, one after the other; raises ``child_silent`` for the first that is."""
    for link in LINKS:
        link.push(context, timeout_s)


def follow(child_end: Connection, adopted: Callable[[RestoreContext], None] | None = None) -> threading.Thread:
    """In a child: takes over each new identity as it comes, in a thread of its own.

    ``adopted`` runs after environment and randomness are new and before the parent is told so.
    """

    def run() -> None:
        while True:
            try:
                env, incarnation = child_end.recv()
            except (EOFError, OSError):  # the parent has ended
                return
            context = RestoreContext(env=env, incarnation=incarnation)
            apply_environment(context)
            reseed()
            if adopted is not None:
                adopted(context)
            child_end.send(incarnation)

    thread = threading.Thread(target=run, name="identity", daemon=True)
    thread.start()
    return thread
