"""What the passes read off a program: data flow, roles, the parts of a step, costs of ops."""
