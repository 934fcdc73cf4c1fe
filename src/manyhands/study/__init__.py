"""A study is a grid of runs, read from a file and run cell by cell; finished cells are not run again."""

from manyhands.core.callable_module import callable_as

callable_as(__name__, "manyhands.study.python_study:study")
