"""Read container images on disk: OCI layouts and the archives of `docker save`.

Knows index, manifests, blobs and their digests (OCI image-spec 1.1, Docker's schema 2 and its older archive form).
Yields the start configuration and the layers' files; does not unpack them. Nothing in an image is trusted: names of
blobs are digests that are checked, and every file is opened inside the layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from crab.errors import ArchiveRefused, Damaged, InvalidRequest, NotFound
from crab.host.beneath import open_beneath
from crab.sandbox.images import seal
from crab.sandbox.images.source import ImageConfig

_DIGEST = re.compile(r"(sha256|sha512):([0-9a-f]{64,128})")
_JSON_LIMIT = 16 << 20
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_REF_NAME = "org.opencontainers.image.ref.name"
_NESTING = 4


class Layer(msgspec.Struct, frozen=True):
    """One layer: the file of its archive."""

    path: str
    """Relative to the layout."""
    digest: str
    """Of the file, if the image states one; else empty."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """One container image of a layout."""

    root: Path
    config: ImageConfig
    architecture: str
    layers: tuple[Layer, ...]

    @contextlib.contextmanager
    def opened(self, layer: Layer) -> Iterator[Path]:
        """A path to the archive of a layer, whose digest is right. Damaged if it is not."""
        with _open(self.root, layer.path) as file:
            _verify(file, layer.digest, layer.path)
            # The open file and not its name: what was verified is what is unpacked.
            yield Path(f"/proc/self/fd/{file.fileno()}")


def read(root: Path, tag: str) -> Bundle:
    """The image in the layout `root`; `tag` may be empty if there is one only. InvalidRequest, NotFound if unclear."""
    if (root / "index.json").is_file():
        return _oci(root, tag)
    if (root / "manifest.json").is_file():
        return _docker(root, tag)
    raise InvalidRequest(
        f"{root} is no container image: it has neither index.json nor manifest.json",
        remedy="make one with `skopeo copy … oci:FOLDER:TAG`, or with `docker save`",
    )


# ---------------------------------------------------------------- files in a layout


@contextlib.contextmanager
def _open(root: Path, path: str) -> Iterator[IO[bytes]]:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Symlinks inside are in use: `docker save` of old links equal layers, shared blobs are a linked folder.
        descriptor = open_beneath(folder, os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK, links="beneath")
    except OSError as error:
        raise Damaged(
            f"the container image {root} is incomplete: {path}: {error.strerror}", remedy="copy or download it again"
        ) from error
    finally:
        os.close(folder)
    with open(descriptor, "rb") as file:
        yield file


def _verify(file: IO[bytes], digest: str, shown: str) -> None:
    if not digest:
        return
    algorithm, _, wanted = digest.partition(":")
    found = hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]
    if found != wanted:
        raise Damaged(
            f"{shown} of the container image has the digest {algorithm}:{found}, its manifest states {digest}",
            remedy="copy or download the image again",
        )
    file.seek(0)


def _json(root: Path, path: str, digest: str = "") -> dict[str, Any]:
    with _open(root, path) as file:
        _verify(file, digest, path)
        content = file.read(_JSON_LIMIT + 1)
    if len(content) > _JSON_LIMIT:
        raise ArchiveRefused(f"{path} of the container image is too large")
    try:
        data = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise Damaged(
            f"{path} of the container image is no JSON: {error}", remedy="copy or download it again"
        ) from error
    if not isinstance(data, dict):
        data = {"list": data}
    return data


def _blob(descriptor: Any) -> tuple[str, str]:
    """Path and digest of a blob; the digest becomes part of a path, so its form matters."""
    digest = descriptor.get("digest", "") if isinstance(descriptor, dict) else ""
    match = _DIGEST.fullmatch(str(digest))
    if match is None:
        raise ArchiveRefused(f"the container image names a blob by {digest!r}, which is no digest")
    return f"blobs/{match[1]}/{match[2]}", str(digest)


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data.get(key) or []
    if not isinstance(value, list):
        raise ArchiveRefused(f"{key!r} of the container image is no list")
    return value


# ---------------------------------------------------------------- OCI


def _oci(root: Path, tag: str) -> Bundle:
    descriptor = _choose(_list(_json(root, "index.json"), "manifests"), tag, root)
    for _ in range(_NESTING):
        path, digest = _blob(descriptor)
        manifest = _json(root, path, digest)
        kind = manifest.get("mediaType") or descriptor.get("mediaType", "")
        if kind not in _INDEX_TYPES and "manifests" not in manifest:
            break
        descriptor = _for_this_machine(_list(manifest, "manifests"), root)
    else:
        raise ArchiveRefused(f"the container image {root} consists of indexes of indexes")
    if kind and kind not in _MANIFEST_TYPES:
        raise InvalidRequest(f"{root} is no container image but {kind}")
    config = _json(root, *_blob(manifest.get("config")))
    layers = []
    for layer in _list(manifest, "layers"):
        media = str(layer.get("mediaType", "")) if isinstance(layer, dict) else ""
        if media and "tar" not in media:
            raise InvalidRequest(
                f"a layer of {root} is no file system but {media}", remedy="use an ordinary container image"
            )
        layers.append(Layer(*_blob(layer)))
    return _bundle(root, config, layers)


def _choose(manifests: list[Any], tag: str, root: Path) -> dict[str, Any]:
    known = [entry for entry in manifests if isinstance(entry, dict)]
    names = [str((entry.get("annotations") or {}).get(_REF_NAME, "")) for entry in known]
    for wanted in (tag,) if tag else ("latest",):
        for entry, name in zip(known, names, strict=True):
            if name == wanted or name.endswith(":" + wanted):
                return entry
    if not tag and len(known) == 1:
        return known[0]
    if not tag and known and all("platform" in entry for entry in known):
        return _for_this_machine(known, root)
    there = ", ".join(sorted(name for name in names if name)) or "none with a tag"
    if tag:
        raise NotFound(f"there is no image with the tag {tag!r} in {root}; there are: {there}")
    raise InvalidRequest(f"there are several images in {root}: {there}", remedy=f"choose one: oci:{root}:TAG")


def _for_this_machine(manifests: list[Any], root: Path) -> dict[str, Any]:
    found = []
    for entry in manifests:
        platform = entry.get("platform") or {} if isinstance(entry, dict) else {}
        architecture = seal.oci_architecture(str(platform.get("architecture", "")))
        if platform.get("os") == "linux" and architecture == seal.host_architecture():
            return dict(entry)
        found.append(f"{platform.get('os', '?')}/{architecture or '?'}")
    raise InvalidRequest(
        f"the container image {root} has no variant for linux/{seal.host_architecture()}, only: {', '.join(found)}",
        remedy="use an image for this machine",
    )


# ---------------------------------------------------------------- docker save, before it wrote OCI layouts


def _docker(root: Path, tag: str) -> Bundle:
    images = [entry for entry in _list(_json(root, "manifest.json"), "list") if isinstance(entry, dict)]
    tags = [name for entry in images for name in _list(entry, "RepoTags")]
    if tag:
        images = [
            entry
            for entry in images
            if any(name == tag or name.endswith(":" + tag) for name in _list(entry, "RepoTags"))
        ]
    if not images:
        raise NotFound(
            f"there is no image with the tag {tag!r} in {root}; there are: {', '.join(map(str, tags)) or 'none'}"
        )
    if len(images) > 1:
        raise InvalidRequest(
            f"there are several images in {root}: {', '.join(map(str, tags))}", remedy="choose one: oci:ARCHIVE.tar:TAG"
        )
    config = _json(root, str(images[0].get("Config", "")))
    # The digests in the configuration are of uncompressed layers, which is what these archives contain.
    digests = [str(digest) for digest in _list(config.get("rootfs") or {}, "diff_ids")]
    paths = [str(path) for path in _list(images[0], "Layers")]
    if len(digests) != len(paths) or not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise Damaged(f"the container image {root} is inconsistent: {len(paths)} layers, {len(digests)} digests")
    return _bundle(root, config, [Layer(path, digest) for path, digest in zip(paths, digests, strict=True)])


# ---------------------------------------------------------------- configuration


def _bundle(root: Path, config: dict[str, Any], layers: list[Layer]) -> Bundle:
    system = str(config.get("os") or "linux")
    if system != "linux":
        raise InvalidRequest(f"the container image {root} is made for {system}, not for Linux")
    start = config.get("config") or {}
    if not isinstance(start, dict):
        start = {}
    env = {key: value for key, found, value in (str(pair).partition("=") for pair in _list(start, "Env")) if found}
    return Bundle(
        root=root,
        config=ImageConfig(
            env=env,
            workdir=str(start.get("WorkingDir") or ""),
            user=str(start.get("User") or ""),
            entrypoint=tuple(map(str, _list(start, "Entrypoint"))),
            command=tuple(map(str, _list(start, "Cmd"))),
        ),
        architecture=seal.oci_architecture(str(config.get("architecture") or seal.ANY)),
        layers=tuple(layers),
    )
