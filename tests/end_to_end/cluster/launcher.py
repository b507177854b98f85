"""Process 1 of a stage's pod, in the place of Argo's emissary with KFP's launcher: runs here only inside pods.

launcher.py OUTPUTS COMMAND ARGUMENT...

OUTPUTS is `{"folders": [...], "file": PATH, "parameters": {NAME: PATH}, "artifacts": {LOCAL PATH: ADDRESS}}` as JSON.
When the command has ended well, the artifacts it wrote are uploaded, and the executor output and the parameters that
it wrote to files leave as the container's termination message.

On SIGTERM the whole group of the command gets the signal, and this process ends without waiting for it, and so
does the container: that is what the launcher's default handling of the signal comes to.
"""

import json
import os
import signal
import subprocess
import sys

TERMINATION_MESSAGE = "/dev/termination-log"
LONGEST_MESSAGE = 4096
"""Bytes that Kubernetes keeps of a termination message."""


def main(outputs, command):
    """Runs the command and returns its exit code."""
    print("launcher: starts", flush=True)
    for folder in outputs["folders"]:
        os.makedirs(folder, exist_ok=True)
    process = subprocess.Popen(command, start_new_session=True)

    def leave(number, _):
        os.killpg(process.pid, number)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    code = process.wait()
    if code:
        return code if code > 0 else 128 - code
    _upload(outputs["artifacts"])
    files = {name: _read(path) for name, path in outputs["parameters"].items() if os.path.exists(path)}
    message = json.dumps({"output": json.loads(_read(outputs["file"])), "files": files})
    if len(message.encode()) > LONGEST_MESSAGE:
        sys.exit(f"the executor output has more than {LONGEST_MESSAGE} bytes: {message}")
    with open(TERMINATION_MESSAGE, "w", encoding="utf-8") as file:
        file.write(message)
    return 0


def _read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def _upload(artifacts):
    for path, address in artifacts.items():
        if os.path.exists(path):  # metrics are metadata alone
            from baton.store.storage import Storage

            folder, _, name = address.rpartition("/")
            storage = Storage(folder)
            if os.path.isfile(path):
                storage.upload(path, name)
            for parent, _, names in os.walk(path):
                for local in (os.path.join(parent, inner) for inner in names):
                    storage.upload(local, f"{name}/{os.path.relpath(local, path)}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
