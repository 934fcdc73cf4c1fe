"""A study is a grid of runs: read from a file, run one cell at a time, finished cells never again."""
