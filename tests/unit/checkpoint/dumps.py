"""Process images as CRIU writes them, as far as pages of memory go."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import strategies as st

from crab.checkpoint.imagefiles import serialize
from crab.checkpoint.pages import PAGE


def image(path: Path, *messages: list[tuple[int, int, int | bytes]]) -> None:
    texts = [serialize(list(message)) for message in messages]
    path.write_bytes(bytes(8) + b"".join(struct.pack("<I", len(text)) + text for text in texts))


class Dump:
    """Images of some processes: a page for each address."""

    def __init__(
        self, folder: Path, spaces: dict[int, dict[int, bytes]], parents: dict[int, int] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.files: dict[str, bytes] = {}
        parents = parents or {}
        image(folder / "pstree.img", *[[(1, 0, pid), (2, 0, parents.get(pid, 0))] for pid in spaces])
        for pid, found in spaces.items():
            entries: list[list[tuple[int, int, int | bytes]]] = [[(1, 0, pid)]]
            for address in sorted(found):
                if len(entries) > 1 and entries[-1][0][2] + entries[-1][1][2] * PAGE == address:  # type: ignore[operator]
                    entries[-1][1] = (2, 0, entries[-1][1][2] + 1)  # type: ignore[operator]
                else:
                    entries.append([(1, 0, address), (2, 0, 1), (4, 0, 4)])
            data = b"".join(found[address] for address in sorted(found))
            image(folder / f"pagemap-{pid}.img", *entries)
            (folder / f"pages-{pid}.img").write_bytes(data)
            self.files[f"pages-{pid}.img"] = data


def page(number: int) -> bytes:
    return struct.pack("<Q", number) * (PAGE // 8)


def space(*numbers: int, at: int = 0x1000000) -> dict[int, bytes]:
    return {at + place * PAGE: page(number) for place, number in enumerate(numbers)}


dumps = st.dictionaries(
    st.integers(1, 3),
    st.dictionaries(st.integers(1, 150).map(lambda n: n * PAGE), st.integers(0, 4).map(page), max_size=100),
    max_size=3,
)
