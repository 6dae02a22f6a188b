"""Runs `alpa doctor`."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict

from alpa.tools.doctor.diagnosis import diagnose
from alpa.tools.doctor.text import lines
from alpa.tools.output import until_the_reader_goes


def run(*, json: bool, with_ray: bool) -> int:
    """Prints the diagnosis; returns 0 if Alpa can plan and run here, else 1."""
    found = diagnose(with_ray=with_ray)
    with until_the_reader_goes():
        if json:
            print(json_format.dumps({**asdict(found), "works": found.works}, indent=2))
        else:
            print("\n".join(lines(found)))
    return 0 if found.works else 1
