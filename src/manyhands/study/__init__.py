"""A study is a grid of runs: read from a file, run a cell at a time, finished cells never again."""
