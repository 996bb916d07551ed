"""Build hook: a wheel carries the C programs built, so that whoever installs it needs no compiler.

An editable install is left alone: `python -m crab.native` (or `make`) builds them in the source tree.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compile `src/crab/native/*.c` into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        spec = importlib.util.find_spec("crab.native")
        assert spec and spec.loader
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        native.build()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # static programs: any Python, one machine architecture
        build_data["artifacts"].append("src/crab/native/bin/crab-*")
