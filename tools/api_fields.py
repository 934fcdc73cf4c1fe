"""An extension of griffe: the fields of a public class as one table, with the comments behind them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


class ApiFields(griffe.Extension):
    """What stands behind a field as a comment is its documentation."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        griffe.DataclassesExtension().on_package(pkg=pkg, loader=loader)  # signatures, while fields are there
        for module in _modules(pkg):
            for cls in module.classes.values():
                if not cls.is_alias and cls.docstring and _has_fields(cls):
                    _tabulate(cls)
            for function in module.functions.values():
                if not function.is_alias and function.docstring:
                    function.docstring.value = fenced(function.docstring.value)


def fenced(text: str) -> str:
    """A docstring whose lines that begin with `>>> ` are a block of Python."""

    def block(lines: re.Match[str]) -> str:
        return f"```python\n{lines[0].replace('>>> ', '').rstrip()}\n```\n"

    return re.sub(r"(?:^>>> .*\n?)+", block, text, flags=re.MULTILINE)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inside in module.modules.values():
        if not inside.is_alias:
            yield from _modules(inside)


def _has_fields(cls: griffe.Class) -> bool:
    return "dataclass" in cls.labels or any(str(base) == "BaseModel" for base in cls.bases)


def _tabulate(cls: griffe.Class) -> None:
    comments = _comments(cls)
    rows = []
    for name, attribute in list(cls.attributes.items()):
        if "property" in attribute.labels or attribute.is_alias:
            continue
        cls.del_member(name)
        if (
            attribute.is_private
            or "instance-attribute" not in attribute.labels
            or attribute.annotation is None
        ):
            continue
        text = comments.get(attribute.lineno or 0, "")
        default = f"default `{attribute.value}`" if attribute.value is not None else "required"
        rows.append(
            griffe.DocstringAttribute(
                name, annotation=attribute.annotation, description="; ".join(filter(None, (text, default)))
            )
        )
    assert cls.docstring is not None
    sections: list[griffe.DocstringSection] = [griffe.DocstringSectionText(cls.docstring.value)]
    if rows:
        sections.append(griffe.DocstringSectionAttributes(rows, title="Fields"))
    cls.docstring.__dict__["parsed"] = sections  # a cached property: this is what is drawn


def _comments(cls: griffe.Class) -> dict[int, str]:
    """By line: the comment at its end, or the whole lines of comment before it."""
    found: dict[int, str] = {}
    above: list[str] = []
    assert isinstance(cls.filepath, Path)
    source = "".join(f"{line}\n" for line in cls.lines_collection[cls.filepath])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                above.append(text)
            else:
                found[token.start[0]] = text
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            if above:
                found.setdefault(token.start[0], " ".join(above))
            above = []
    return found
