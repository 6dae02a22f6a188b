"""A training that goes on and on, and whether what it holds of its hosts stays the same.

`training` is what runs, `samples` what is recorded of it, `turns` how its steps compare with those
of a fresh run, `verdict` what is made of that.
"""
