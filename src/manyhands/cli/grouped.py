"""A command whose `--help` shows its flags in groups, as plain text that is also readable in a pipe."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from manyhands.cli.flags import GROUPS


class GroupedCommand(TyperCommand):
    """Writes one section per group (typer's `rich_help_panel`): the known groups, then one per strategy."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the groups, then the flags without a group."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            group = "Arguments" if parameter.param_type_name == "argument" else None
            group = group or getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(group, []).append(record)
        rest = sections.pop("Options", [])
        for title, records in [*sections.items(), ("Options", rest)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
