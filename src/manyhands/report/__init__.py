"""A study as charts, tables and one HTML page that works offline, made from records alone (law 8)."""
