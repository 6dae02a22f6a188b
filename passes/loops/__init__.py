"""Loops over layers: which there are, and how they are cut between trips (`split-loops`)."""
