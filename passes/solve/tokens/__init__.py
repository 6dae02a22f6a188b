"""Cuts sequences and batches into token slices: micro-batches that are parts of sequences."""
