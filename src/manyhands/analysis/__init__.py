"""What records say when they are put side by side: pure functions from records to named tuples."""
