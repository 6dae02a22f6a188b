"""Properties of programs for the passes: data flow, roles, the parts of a step, costs of ops."""
