"""Tensors from one mesh to another (paper, section 6)."""
