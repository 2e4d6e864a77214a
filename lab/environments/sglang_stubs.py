"""Stands in for torchvision and triton, which SGLang imports and its host tiers do not use.

There are no builds of either for torch on CPUs that the index has. Copied into the environment of
`make test-sglang`, whose .pth file imports it; a real package takes precedence.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("torchvision", "triton")


class Anything(type):
    """A class that has every attribute; called with a function, as a decorator, it returns it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], types.FunctionType) else cls

    def __iter__(cls) -> Any:
        return iter(())


class Stub(types.ModuleType):
    """A module that has every attribute."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each absent package and all its submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code."""


sys.meta_path.append(Finder())
