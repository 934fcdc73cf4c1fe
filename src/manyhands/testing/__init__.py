"""Conformance suites: a new task, recipe, strategy, transport or launcher is tested by subclassing one."""
