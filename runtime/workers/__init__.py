"""Runs a plan on Ray: one actor per host of a mesh, one call per mesh and step.

`cluster` finds hosts for the plan's hosts, `worker` runs there, `transport` carries tiles between
workers, `group` holds the workers and notices when one fails, `executor` is the caller's side, and
`remote_array` is what a step returns.
"""
