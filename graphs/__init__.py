"""Which code runs a pass, and at which row count: rungs, compiled regions, captured graphs. Knows no question."""
