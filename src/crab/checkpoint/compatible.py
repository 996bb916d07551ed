"""Whether a checkpoint may be restored on this host. Pure decision over what was recorded and what is here (hazard R08)."""

from __future__ import annotations

from crab.errors import Incompatible
from crab.model import HostPrint


def check_host(made: HostPrint, here: HostPrint) -> None:
    """Raise `Incompatible`, naming both sides, if process images made there are not known to work here."""
    for name, what in (("architecture", "architecture"), ("cpu", "processor"), ("kernel", "kernel"), ("criu", "CRIU")):
        old, new = getattr(made, name), getattr(here, name)
        if old != new:
            raise Incompatible(
                f"the checkpoint was made with {what} {old}, this host has {new}",
                remedy="restore on a host like the first, or restore the files alone (--files-only)",
                made=old,
                here=new,
            )


def check_image(name: str, made: str, here: str) -> None:
    """Raise `Incompatible` if the image of that name is not the one that the checkpoint was taken on."""
    if made != here:
        raise Incompatible(
            f"the checkpoint was made on image {name} {made}, this host has {here}",
            remedy=f"add the same image again, or export the checkpoint together with its image ({name})",
            made=made,
            here=here,
        )
