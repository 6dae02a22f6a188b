"""The parts of `simplify-trivial-ops`: inlining, annotations, rewrites and follow marks."""
