"""TAPAS: mined subgraphs, a decision tree over their sharding patterns, and a ranked list."""
