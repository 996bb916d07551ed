"""The smallest workload: a shell that counts in its memory and in a file, for images without Python too."""

from __future__ import annotations

from e2e.box import Box, eventually


def counter(box: Box, name: str = "n") -> int:
    """Value of a counter started by `count`."""
    return int(box.read(f"/tmp/{name}").strip() or 0)


def count(box: Box, name: str = "n") -> None:
    """A shell that counts for ever in its memory and in a file, and stops when the two differ."""
    box.background(
        f'n=0; echo 0 >/tmp/{name}; while [ "$(cat /tmp/{name})" = $n ]; do '
        f"n=$((n + 1)); echo $n >/tmp/.{name}; mv /tmp/.{name} /tmp/{name}; sleep 0.02; done; echo -1 >/tmp/{name}"
    )
    eventually(lambda: counter(box, name) > 1, "a count")


def counts_on(box: Box, name: str = "n") -> int:
    """Wait until the counter has moved on; it never stops by itself."""
    first = counter(box, name)

    def moved() -> bool:
        now = counter(box, name)
        assert now != -1, "memory and file came from different moments"
        return now > first

    eventually(moved, lambda: f"counting on from {first} in {box.name}")
    return counter(box, name)
