"""A source distribution from the package index, pinned by its digest and kept in a cache folder.

pip does the fetching, so that its configuration (index, proxy, certificates) is what counts. Knows nothing of stories.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from crab.errors import Damaged, HostUnsuitable
from crab.model import Struct

_PATIENCE = 300.0  # seconds for pip, which may have to build what reads the package's metadata


class Sdist(Struct, kw_only=True):
    """One file of the index."""

    name: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.name}-{self.version}.tar.gz"


def fetch(sdist: Sdist, cache: Path) -> Path:
    """The file in the cache folder, fetched if it is not there. Raises HostUnsuitable or Damaged.

    pip runs the package's own set-up code to read its metadata; only content with the pinned digest comes that far.
    """
    path = cache / sdist.filename
    if path.exists():
        return _checked(path, sdist)
    cache.mkdir(parents=True, exist_ok=True)
    by_hand = f"put {sdist.filename} from the package index into {cache}"
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{sdist.name}=={sdist.version} --hash=sha256:{sdist.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", sdist.name, "--require-hashes", "--dest", folder, "--requirement", str(wanted)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise HostUnsuitable(
                f"pip did not fetch {sdist.filename} within {_PATIENCE:.0f} s", remedy=by_hand
            ) from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {done.returncode}"
            raise HostUnsuitable(
                f"pip could not fetch {sdist.filename}: {said}", remedy=f"see `pip config list`, or {by_hand}"
            )
        fetched = _checked(Path(folder) / sdist.filename, sdist)
        fetched.rename(path)
    return path


def _checked(path: Path, sdist: Sdist) -> Path:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise HostUnsuitable(f"{path} cannot be read: {error.strerror}", remedy="remove it and try again") from error
    if found != sdist.sha256:
        raise Damaged(f"{path} has the SHA-256 {found}, not {sdist.sha256}", remedy="remove it and try again")
    return path
