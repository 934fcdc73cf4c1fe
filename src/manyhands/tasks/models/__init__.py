"""The networks of the tasks, each a plain sequence of blocks that can be divided into stages."""
