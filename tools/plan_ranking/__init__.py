"""Compares the predicted order of a program's plans with that of their real times."""
