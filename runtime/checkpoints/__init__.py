"""Training states on disk.

`checkpoint` has the public functions. `writing` uses Orbax, `stored_array` writes and reads one
array from many processes, and `manifest` describes and checks a folder.
"""
