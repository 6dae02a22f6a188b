"""Questions about a plan: why it is so (`explain`), and how two plans differ (`compare`)."""
