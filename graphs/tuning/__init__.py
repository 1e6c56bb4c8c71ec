"""Which code runs a product: candidates, their times and byte tests, and the table of winners on disk.

Imports `ops` and `graphs.rungs`. Knows weight shapes and row counts, no model and no question.
"""
