"""What stands on the wire: requests, token ids, answers; one processor per family of models.

Imports `engine.errors`, `engine.prompt` and `engine.statistics`. Knows questions, and no tensor of a device.
"""
