"""A hash of what a task computes, for tasks that are Python objects: has it changed since the run began?

It covers the bytes of tensors and arrays, and the code of the user's functions and classes with what they
refer to: closures, defaults, and globals of modules that are not installed packages. File names and line
numbers are left out, so that a notebook can be opened again. Objects of other libraries count by their class
and their attributes.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from manyhands.core.tracebacks import is_the_users

DIGITS = 12
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


def fingerprint(value: object) -> str:
    """Twelve hexadecimal digits."""
    walker = _Walker()
    walker.add(value)
    return walker.digest.hexdigest()[:DIGITS]


class _Walker:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is used again

    def add(self, value: Any) -> None:
        """Add a value and all that it refers to."""
        if isinstance(value, _PLAIN):
            self._note(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._note("again", str(self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            self._note("tensor", f"{value.dtype} {tuple(value.shape)}")
            flat = value.contiguous().reshape(-1)
            self.digest.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._note("array", f"{value.dtype} {value.shape}")
            self.digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, list | tuple):
            self._several(type(value).__name__, value)
        elif isinstance(value, dict):
            pairs = sorted(value.items(), key=lambda pair: repr(pair[0]))
            self._several("dict", [part for pair in pairs for part in pair])
        elif isinstance(value, set | frozenset):
            self._several("set", sorted(value, key=repr))
        elif isinstance(value, CodeType):
            self._several("code", (value.co_code, value.co_names, value.co_varnames, value.co_consts))
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._several("method", (value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._several(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._several("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._several("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType | BuiltinFunctionType):
            self._note("named", getattr(value, "__name__", ""))
        else:
            self._several("object", (type(value), getattr(value, "__dict__", {})))

    def _note(self, kind: str, text: str) -> None:
        self.digest.update(f"{kind}:{len(text)}:{text};".encode(errors="surrogatepass"))

    def _several(self, kind: str, parts: Any) -> None:
        self._note(kind, str(len(parts)))
        for part in parts:
            self.add(part)

    def _function(self, function: FunctionType) -> None:
        if not _is_the_users(function):
            self._note("function", f"{function.__module__}.{function.__qualname__}")
            return
        cells = [_content(cell) for cell in function.__closure__ or ()]
        self._several(
            "function", (function.__code__, function.__defaults__, function.__kwdefaults__ or {}, cells)
        )
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self._note("global", name)
                self.add(function.__globals__[name])

    def _class(self, kind: type) -> None:
        users = _is_the_users(kind)
        self._note("class", kind.__name__ if users else f"{kind.__module__}.{kind.__qualname__}")
        if users:
            own = {
                n: v for n, v in vars(kind).items() if not n.startswith("__") or isinstance(v, FunctionType)
            }
            self._several("members", (kind.__bases__, own))


def _names(code: CodeType) -> set[str]:
    """The names that a function and those inside it may look up."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_the_users(value: FunctionType | type) -> bool:
    """Whether it was written by the user: not installed, not part of Python, and not ours."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or module.__name__ == "__main__":
        return True
    try:
        file = inspect.getfile(module)
    except (TypeError, OSError):  # built into Python, or typed in
        return module.__name__ not in sys.builtin_module_names and not hasattr(module, "__spec__")
    return is_the_users(file)
