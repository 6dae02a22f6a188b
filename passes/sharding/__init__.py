"""Sharding on one mesh: rules of ops, their strategies, the problem they make, and its folding."""
