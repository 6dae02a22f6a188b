"""Alpa: automatic inter- and intra-operator parallelism for StableHLO programs.

`alpa.passes` is the compiler for embedders, `alpa.runtime` runs what it planned, and
`alpa.dialects` is the vocabulary of the IR.
"""
