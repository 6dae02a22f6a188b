"""Feeds broken input to commands, the runtime and checkpoints, and checks their answers.

`corpus` has the inputs to break, and `mutations` breaks texts. `commands`, `plans` and
`checkpoints` are the cases, and `process` runs them.
"""
