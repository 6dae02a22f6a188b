"""Benchmarks of Alpa's own searches."""
