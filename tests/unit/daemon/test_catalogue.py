"""What is said of an image while it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crab.daemon import requests as ask
from crab.daemon.catalogue import image_add, image_step


@pytest.mark.parametrize("fails", [False, True])
def test_the_step_is_known_while_an_image_is_made_and_not_afterwards(fails: bool) -> None:
    seen: list[str] = []

    def add(name: str, source: str, *, progress: Any, **_: Any) -> str:
        for step in ("", "extracting archives"):
            if step:
                progress(step)
            seen.append(image_step(core, ask.ImageStep(name=name)))
        seen.append(image_step(core, ask.ImageStep(name="another")))
        if fails:
            raise OSError
        return name

    core: Any = SimpleNamespace(steps={}, images=SimpleNamespace(add=add), users_of_image=lambda _: [])
    try:
        image_add(core, ask.ImageAdd(name="x", source="debian:bookworm"))
    except OSError:
        assert fails
    assert seen == ["making image x of debian:bookworm", "extracting archives", ""]
    assert image_step(core, ask.ImageStep(name="x")) == ""
