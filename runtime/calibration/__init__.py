"""Measures devices and links, and describes them as a cluster file.

`measure` runs programs with jax, `fit` turns samples into the figures of the cost model, and
`text` writes and compares them.
"""
