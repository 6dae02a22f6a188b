"""Training states on disk.

`checkpoint` has the public functions. `writing` describes a state by Orbax and stores its arrays,
`stored_array` is one array that many processes write and read, and `shards` are the parts of this
process. `unfinished` is the folder until it is complete, and `manifest` describes and checks it.
`background` is the save that is written while training goes on.
"""
