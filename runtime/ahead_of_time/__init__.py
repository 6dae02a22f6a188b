"""Compiles the stages of a plan for devices that are not here, and compares them with the plan."""
