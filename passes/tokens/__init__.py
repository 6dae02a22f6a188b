"""Rewrites the stages of a causal program into token slices, for `token-slice`.

`cuts` says which parts of an op's operands a part of its result needs, `slicer` writes a fragment's
ops for one slice, and `stages` puts the fragments of all slices in the place of a stage's.
"""
