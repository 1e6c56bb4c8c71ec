"""From token ids to passes: the tree of segments, its cut into passes, and the bytes that they need.

Imports `engine.load.dimensions` for sizes, `graphs.rungs` and `ops.tables`. Host numbers only, no tensor, no question.
"""
