"""What modules have that came from HLO, in the terms of StableHLO and JAX."""
