"""A study as charts, tables and one HTML page that works offline, made from records alone (law 8)."""

from manyhands.core.callable_module import callable_as

callable_as(__name__, "manyhands.report.notebook:report")
