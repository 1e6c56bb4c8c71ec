"""What touches the device: its one owner, the executor, the model, and the buffers of snapshots.

Imports `engine.plan`, the weights of `engine.load`, `graphs` and `ops`. Knows segments and reads, never a question.
"""
