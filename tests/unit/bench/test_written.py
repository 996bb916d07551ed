from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.written import written


def test_what_is_above_the_image_is_told_from_what_is_in_it(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for folder in (upper / "etc", upper / "new/deep", lower / "etc/sub"):
        folder.mkdir(parents=True)
    (upper / "etc/both").write_text("changed")
    (lower / "etc/both").write_text("as it was")
    (lower / "etc/alone").write_text("not looked at")
    (upper / "etc/mine").write_text("")
    found = written(upper, lower)
    assert sorted(found.single) == ["/", "/etc", "/etc/both"]
    assert sorted(found.folders) == ["/", "/etc"]
    assert sorted(found.trees) == ["/etc/mine", "/new"]
    assert found.gone == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device")
def test_a_name_that_hides_one_of_the_image_is_gone(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    upper.mkdir()
    lower.mkdir()
    (lower / "file").write_text("")
    os.mknod(upper / "file", 0o020000, 0)
    assert written(upper, lower).gone == ["/file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="sets a trusted attribute")
@pytest.mark.parametrize("name", ["opaque", "redirect"])
def test_a_folder_that_was_replaced_is_looked_at_whole(tmp_path: Path, name: str) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for folder in (upper / "etc", lower / "etc"):
        folder.mkdir(parents=True)
    os.setxattr(upper / "etc", f"trusted.overlay.{name}", b"y")
    found = written(upper, lower)
    assert (found.trees, found.folders) == (["/etc"], ["/"])
