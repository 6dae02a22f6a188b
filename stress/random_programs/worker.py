"""The process that runs programs: reads a seed per line, and writes an outcome as JSON for each.

    echo 7 | python -m stress.random_programs.worker

An exception or an abort ends the process; `workers.py` notices.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax

from stress.random_programs.check import check

DEVICES = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stress.random_programs.worker")
    parser.add_argument("--widen", action="store_true")
    options = parser.parse_args()
    # Both must be set before JAX touches a device.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for line in sys.stdin:
        outcome = check(int(line), widen=options.widen)
        print(json.dumps(outcome.to_json()), flush=True)


if __name__ == "__main__":
    main()
