"""Whether micro-batches give what the whole batch gives: a proof, op by op.

`relation` says which relations there are, `relate` finds them by the rules in `elementwise`,
`shapes`, `contractions` and `indexing`; `whole` holds a program against itself at the size of the
whole batch. The pass `combine-micro-batches` uses them.
"""
