"""The manifest on disk."""

from __future__ import annotations

import json

import pytest

from crab.checkpoint import manifest as manifests
from crab.checkpoint.manifest import Manifest
from crab.errors import Damaged, Incompatible
from crab.model import Checkpoint, HostPrint, SandboxSpec

MADE = Manifest(
    checkpoint=Checkpoint(id="c1", sandbox="s1", turn=1, kind="full", created=1.0),
    sandbox_name="work",
    spec=SandboxSpec(image="debian"),
    runtime="r",
    host=HostPrint(kernel="6", architecture="x86_64", cpu="c", criu="4"),
    groups={"x1": (2, 3)},
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert manifests.decode(manifests.encode(MADE)) == MADE


def test_fields_of_a_later_version_of_the_same_schema_are_ignored() -> None:
    data = json.loads(manifests.encode(MADE)) | {"added_later": 1}
    assert manifests.decode(json.dumps(data).encode()) == MADE


def test_a_newer_schema_is_refused() -> None:
    data = json.loads(manifests.encode(MADE)) | {"schema": manifests.SCHEMA + 1}
    with pytest.raises(Incompatible):
        manifests.decode(json.dumps(data).encode())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"schema": 1}', b'{"schema": "x"}', manifests.encode(MADE)[:-10]]
)
def test_what_is_no_manifest_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        manifests.decode(data)
