"""`alpa.runtime.ahead_of_time.compilation`: what the compiling processes say."""

from __future__ import annotations

from alpa.runtime.ahead_of_time.compilation import without_notices

SAID = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795537812.516076   25206 cudart_stub.cc:31] Could not find cuda drivers
W1124 16:30:12.516076   25206 hlo_rematerialization.cc:3200] Can't reduce memory use below 1GiB
E1124 16:30:12.516076   25206 slow_operation_alarm.cc:140] The operation took 2m
@mesh_0.layer_0.backward differs in memory
"""


def test_notices_are_left_out_and_errors_are_kept() -> None:
    assert without_notices(SAID) == SAID.splitlines()[3:]
