"""`alpa-opt --server`: runs pipelines for programs that need many.

Requests and answers are JSON-RPC 2.0 messages, one per line (`protocol.py`). The server imports all
passes once. Each request runs in a process that is forked from it (`child.py`), so that a program
on which MLIR crashes ends nothing else.
"""
