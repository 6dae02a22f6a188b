"""`alpa doctor`: checks that Alpa can plan and run on this machine."""
