"""What is begun beside training leaves it the processor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NICE = """
import contextlib, json, os, threading, time
import obstore
from obstore.store import HTTPStore
from baton.runtime import SYSTEM

def nice(_=None):
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def names():
    named = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            named[task] = open(f"/proc/self/task/{task}/comm").read().strip()
    return named

def of_clients():
    return {os.getpriority(os.PRIO_PROCESS, task) for task, name in names().items() if name.startswith("tokio")}

try:
    once = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    obstore.get(HTTPStore.from_url("http://127.0.0.1:9", **once), "a")
except Exception:
    pass
while list(names().values()).count(names()[os.getpid()]) > 1:
    time.sleep(0.01)  # a thread has its process's name until it gives itself its own
found = {"before": [nice(), *of_clients()]}
def work():
    found["work"] = nice()
    found["each"] = SYSTEM.each(nice, range(3))
SYSTEM.begin(work, "name").join()
found["after"], found["clients"] = nice(), sorted(of_clients())
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are of threads on Linux alone")
def test_work_beside_has_a_lower_priority_and_nothing_else() -> None:
    ran = subprocess.run([sys.executable, "-c", NICE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    usual = found["before"][0]
    assert found["before"] == [usual, usual], "the client's threads are there, and as all others"
    assert usual < 19
    assert (found["work"], found["each"], found["clients"]) == (19, [19] * 3, [19])
    assert found["after"] == usual
