"""The image that the tasks run in, built through the product: Debian with what terminal work needs, and pinned source
distributions from the package index in /opt/sdists. `python -m bench.tasks.image [--state DIR]` builds it.

Its name has a digest of the recipe, so that a change of the recipe makes another image. Knows nothing of the tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import click
import msgspec

import crab
from bench.figures import say
from crab.errors import NotFound
from crab.replay.sdist import Sdist, fetch

SUITE = "debian:bookworm"
PACKAGES = (
    *("bc", "curl", "dpkg-dev", "ed", "fakeroot", "file", "gcc", "jq", "libc6-dev", "make", "nginx-light", "nodejs"),
    *("patch", "postgresql", "python3-pip", "python3-pytest", "python3-venv", "redis-server", "rsync", "socat"),
    *("sqlite3", "tmux"),
)
SDISTS = (
    Sdist(
        name="Markdown",
        version="3.5.2",
        sha256="e1ac7b3dc550ee80e602e71c1d168002f062e49f1b11e26a36264dafd4df2ef8",
    ),
    Sdist(
        name="boltons",
        version="24.0.0",
        sha256="7153feccaea1ff2e1472f68d4b57fadb796a2ee49d29f638f1c9cd8fb5ebd916",
    ),
    Sdist(
        name="idna",
        version="3.6",
        sha256="9ecdbbd083b06798ae1e86adcbfe8ab1479cf864e4ee30fe4e46a003d12491ca",
    ),
    Sdist(
        name="more-itertools",
        version="10.2.0",
        sha256="8fccb480c43d3e99a00087634c06dd02b0d50fbf088b380de5a41a015ec239e1",
    ),
    Sdist(
        name="parse",
        version="1.20.1",
        sha256="09002ca350ad42e76629995f71f7b518670bcf93548bdde3684fd55d2be51975",
    ),
    Sdist(
        name="semver",
        version="3.0.2",
        sha256="6253adb39c70f6e51afed2fa7152bcd414c411286088fb4b9effb133885ab4cc",
    ),
    Sdist(
        name="sqlparse",
        version="0.4.4",
        sha256="d446183e84b8349fa3061f0fe7f06ca94ba65b426946ffebe6e3e8295332420c",
    ),
    Sdist(
        name="tabulate",
        version="0.9.0",
        sha256="0095b12bf5966de529c0feb1fa08671671b3368eec77d7ef7ab114be2c068b3c",
    ),
    Sdist(
        name="toolz",
        version="0.12.1",
        sha256="ecca342664893f177a13dac0e6b41cbd8ac25a358e5f215316d43e2100224f4d",
    ),
    Sdist(
        name="xmltodict",
        version="0.13.0",
        sha256="341595a488e3e01a85a9d8911d8912fd922ede5fecc4dce437eb4b6c8d037e56",
    ),
)
EDIT = Path(__file__).with_name("edit.py")
"""/usr/local/bin/edit: the tool with which the agents of the tasks change a piece of a file."""

CONFIGURE = """set -e
chmod 755 /usr/local/bin/edit
git config --system user.name agent
git config --system user.email agent@sandbox
git config --system init.defaultBranch main
git config --system advice.detachedHead false
git config --system gc.auto 0
git config --system core.excludesFile /etc/gitignore
printf '%s\\n' __pycache__/ .pytest_cache/ >/etc/gitignore
"""
"""What the tasks count on, whatever image they run in."""
PREPARE = f"""{CONFIGURE}
# what tools make at their first start is the image's, not a turn's
rm -f /etc/nginx/sites-enabled/default
python3 -m compileall -q /usr/lib/python3/dist-packages /usr/lib/python3.11 >/dev/null 2>&1 || true
"""


def name() -> str:
    """Of the image that this recipe makes."""
    recipe = json.dumps([SUITE, PACKAGES, msgspec.to_builtins(SDISTS), PREPARE, EDIT.read_text()])
    return f"bench-tasks-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def build(host: crab.Host, cache: Path) -> str:
    """The name of the image, made if it is not there (two minutes, and network); fetched sources are kept in `cache`."""
    wanted = name()
    try:
        return host.images.show(wanted).name
    except NotFound:
        pass
    say(f"image {wanted}: {SUITE}, {len(PACKAGES)} packages, {len(SDISTS)} source distributions; made once")
    base = host.images.add(f"{wanted}-base", f"{SUITE}+{','.join(PACKAGES)}", if_missing=True).name
    with host.create(image=base) as sandbox:
        sandbox.run(["mkdir", "-p", "/opt/sdists"], check=True)
        for sdist in SDISTS:
            sandbox.copy_in(fetch(sdist, cache), f"/opt/sdists/{sdist.filename}")
        sandbox.copy_in(EDIT, "/usr/local/bin/edit")
        sandbox.run(["bash", "-c", PREPARE], cwd="/", check=True)
        sandbox.commit(wanted)
    host.images.remove(base)
    return wanted


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option(
    "--state", default=lambda: os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"), help="State directory."
)
def main(state: str) -> None:
    with crab.Host(state) as host:
        print(build(host, Path(state) / "cache" / "sdists"))


if __name__ == "__main__":
    main()
