"""Ops to layers (paper, section 5.2, eq. 6)."""
