"""A process that stands by begins when it may, and ends with the process that held it back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from baton.components.shared.core import standby
from baton.components.shared.core.errors import BatonError

HOLDER = """
import sys, time
from baton.components.shared.core.standby import Held
held = Held()
print(held.path, flush=True)
time.sleep(60)
"""


def test_it_waits_until_the_machine_is_free() -> None:
    held = standby.Held()
    began = threading.Event()

    def work() -> None:
        standby.wait(held.path)
        began.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not began.wait(0.2)
    held.free()
    assert began.wait(10)
    thread.join()
    standby.wait(held.path)  # at once


def test_it_does_not_outlive_its_holder() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        path = holder.stdout.readline().strip()
        timer = threading.Timer(0.2, holder.send_signal, [signal.SIGKILL])
        timer.start()
        with pytest.raises(BatonError, match="has gone"):
            standby.wait(path)
    with pytest.raises(BatonError, match="has gone"):
        standby.wait("/nowhere/at/all")
