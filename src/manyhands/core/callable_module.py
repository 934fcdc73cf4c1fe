"""A room that can be called: `mh.study(...)` is a function of the user, and `manyhands.study` is a room.

Python makes a package's module an attribute of the package around it as soon as it is imported, so a function
of the same name would be hidden by it. Such a module passes calls on to the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def callable_as(module: str, function: str) -> None:
    """Let calls of this module be calls of a function, named `package.module:function` and imported then."""

    class CallableModule(ModuleType):
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            place, _, name = function.partition(":")
            return getattr(importlib.import_module(place), name)(*arguments, **named)

    sys.modules[module].__class__ = CallableModule
