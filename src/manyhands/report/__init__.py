"""A study as charts, tables and one page that works offline: drawn from records, never from runs (law 8)."""
