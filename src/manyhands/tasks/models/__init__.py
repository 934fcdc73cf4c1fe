"""Networks of the tasks, each a plain sequence of blocks so that it can be cut into stages."""
