"""The strategy of every op on one mesh, at the least cost within memory (paper, section 4.2)."""
