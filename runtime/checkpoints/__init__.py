"""Training states on disk.

`checkpoint` is what users call, `writing` how orbax is used, `stored_array` one array that many
processes write and read, and `manifest` what is believed of a folder.
"""
