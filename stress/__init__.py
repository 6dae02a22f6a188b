"""Long tests for maintainers: random programs, planted faults, fuzzing, soaking."""
