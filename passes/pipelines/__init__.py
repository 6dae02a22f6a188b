"""What `pipeline.py` needs around it: the textual syntax, MLIR's own passes, diagnostics."""
