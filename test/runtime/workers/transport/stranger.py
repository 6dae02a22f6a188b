"""Attacks a worker in some ways at once until it is killed.

python stranger.py ADDRESS ATTACK...
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parent))

from pairs import group

from stress.strangers.attacks import ATTACKS, target_of


def main(address: str, *attacks: str) -> None:
    of, never = group(), threading.Event()
    for name in attacks:
        arguments = (target_of(address), of, never)
        threading.Thread(target=ATTACKS[name], args=arguments, daemon=True).start()
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    never.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
