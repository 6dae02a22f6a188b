"""Random programs on random clusters, planned, run and compared with plain JAX."""
