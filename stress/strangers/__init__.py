"""Strangers at the listeners of workers: `attacks` has what they do, and `pace` what it costs."""
