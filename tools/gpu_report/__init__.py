"""What only a machine with a GPU can show, measured by one command."""
