"""From files, or a seed, to weights and a head: each folder is opened and checked whole before it is used.

Imports `engine.wire` for heads and tokenizers, and `ops`. Knows neither plans nor passes.
"""
