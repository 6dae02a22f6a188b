"""Carries tiles from one worker to another.

`opening` chooses the way: `host_memory` sends tiles through the memory of the hosts, which is
`shared_memory` between workers of one host and `tcp` between hosts; `jax_transfer` leaves them to
JAX. Both ways of `host_memory` admit a peer by `handshake`; `listener` waits for the peers.
"""
