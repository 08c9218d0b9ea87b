"""``dynamo-snapshot install-criu``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def install_criu(
    into: Annotated[
        Path | None, typer.Option(help="The folder to unpack into; by default one inside this Python environment.")
    ] = None,
    suite: Annotated[str, typer.Option(help="The Debian suite to take criu from.")] = "sid",
    force: Annotated[bool, typer.Option("--force", help="Unpack even where a criu works already.")] = False,
) -> None:
    """Install a CRIU that works on this kernel.

    Tries the criu that is there on a small process with a socket. Only where it cannot dump and restore that,
    Debian's newest is unpacked into a folder of its own; the host's packages are not touched. Needs root.
    """
    from rich.console import Console

    from dynamo_snapshot.agent.criu import install as criu_install

    console = Console(highlight=False, soft_wrap=True)
    folder = into.absolute() if into else criu_install.default_folder()
    criu_install.install_criu(folder, suite, force=force, tell=console.print)
