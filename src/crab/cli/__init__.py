"""The `crab` command: parses, calls the SDK, prints. One file for each verb or small family.

Knows nothing that the SDK does not; in particular no verb reaches around it into the layers below, except `daemon` and
`doctor`, which are about this machine.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `crab` command."""
    from crab.cli.app import run

    sys.exit(run(sys.argv[1:]))
