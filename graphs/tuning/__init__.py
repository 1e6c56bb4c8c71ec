"""Which code runs a product: candidates, their times and byte tests, and the table of winners on disk.

Imports `ops`, `graphs.rungs` and `graphs.graph`. Knows weight shapes and row counts, no model and no question.
"""
