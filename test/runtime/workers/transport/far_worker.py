"""One of two workers on different hosts: tells its address, reads the other's, and sends messages.

python far_worker.py RANK IP SECRET
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from pairs import group, shape_of

from alpa.runtime.workers.transport.opening import open_transport


def main(rank: int, ip: str, secret: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    of = group(60.0, rank=rank, ip=ip, secret=bytes.fromhex(secret), hosts=("near", "far"))
    transport = open_transport("auto", of)
    sys.stdout.write(json.dumps(dict(transport.address)) + "\n")
    sys.stdout.flush()
    transport.connect([json.loads(it) for it in json.loads(sys.stdin.readline())])
    for number in range(20):
        transport.send(1 - rank, [jnp.full(1 << 19, number + rank, jnp.float32)])
        (got,) = transport.receive(1 - rank, [shape_of(np.zeros(1 << 19, np.float32), 0)])
        if not (np.asarray(got) == number + 1 - rank).all():
            raise RuntimeError(f"message {number} is wrong")
    sys.stdout.write("all messages arrived\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
