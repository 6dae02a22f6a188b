"""Broken input for commands, the runtime and checkpoints: what is answered must be an answer.

`corpus` is what there is to break and `mutations` how texts are broken; `commands`, `plans` and
`checkpoints` are the cases, and `process` runs them.
"""
