"""A study is a grid of runs, read from a file and run cell by cell; finished cells are not run again."""
