"""Trains for a long time and checks that the resources in use do not grow.

`training` is the run, `samples` records it, `turns` compares its steps with those of a fresh run,
and `verdict` judges the result.
"""
