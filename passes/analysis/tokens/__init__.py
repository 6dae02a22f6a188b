"""Whether a program is causal: a proof, op by op, that no token reads later ones.

`relation` says which relations values have to the tokens, `relate` finds them by the rules in
`elementwise`, `moves` and `contractions`, and `numbers` computes masks. The pass `token-slice`
uses them.
"""
