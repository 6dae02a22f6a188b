"""Layers to stages, stages to devices, and their schedules (paper, section 5)."""
