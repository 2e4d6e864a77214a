"""Build hook: compiles the native module into wheels and editable installs where a compiler is.

Without a compiler the wheel is pure Python, and KVHearth falls back to numpy.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILDER = Path("client/kvhearth/native/build.py")


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds ``_kvhearth.so`` to what is built, and the platform to the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; ``version`` is ``standard`` or ``editable``."""
        builder = _builder(Path(self.root) / BUILDER)
        try:
            library = builder.build()
        except builder.BuildError as error:
            self.app.display_warning(f"the native module is left out: {error}")
            return
        build_data["artifacts"].append(f"/{library.relative_to(self.root).as_posix()}")
        build_data["pure_python"] = False
        # ctypes loads it, so that one library serves every version of Python.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _builder(path: Path) -> Any:
    """Load the builder by its path: the package itself needs numpy, a build does not."""
    spec = importlib.util.spec_from_file_location("kvhearth_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
