"""Operators, a file each: schema, checks, CPU kernel and float64 reference. `tables` is what all of them read, `sizes`
what they share with their kernels and the planner; nothing here knows the engine."""
