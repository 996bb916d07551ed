"""Makes the synchronous facades of the asynchronous ones: `python -m crab.sdk.twin` writes `sync.py`, `--check` compares.

The text differs in keywords and names only, so it is replaced word by word, as httpcore and psycopg do. Needs ruff (a
tool of development) to break the lines anew. Nothing of it runs in the product.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("aio.py")
TWIN = Path(__file__).with_name("sync.py")

_WORDS = {
    r"async def": "def",
    r"async with": "with",
    r"async for": "for",
    r"await ": "",
    r"aconnect": "connect",
    r"__aenter__": "__enter__",
    r"__aexit__": "__exit__",
    r"__aiter__": "__iter__",
    r"async_client": "client",
    r"async_transport": "transport",
    r"asynccontextmanager": "contextmanager",
    r"AsyncIterator": "Iterator",
    r"Async([A-Z])": r"\1",
}
_DOCSTRING = '''"""The synchronous facades. Made from `aio.py` by `python -m crab.sdk.twin`: change that file, not this one."""
'''


def twin(text: str) -> str:
    """The synchronous form of the asynchronous module, before its lines are broken anew."""
    body = text.partition('"""\n\nfrom __future__')[2]
    for word, replacement in _WORDS.items():
        body = re.sub(rf"\b{word}", replacement, body)
    return f"{_DOCSTRING}\nfrom __future__{body}"


def formatted(text: str) -> str:
    """The text as ruff writes it, imports sorted."""
    for step in (["check", "--quiet", "--select", "I", "--fix-only"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(TWIN), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write the twin, or with `--check` tell whether it is up to date."""
    made = formatted(twin(SOURCE.read_text()))
    if arguments == ["--check"]:
        if TWIN.read_text() != made:
            print(f"{TWIN} is not the twin of {SOURCE.name}: run python -m crab.sdk.twin", file=sys.stderr)
            return 1
        return 0
    TWIN.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
