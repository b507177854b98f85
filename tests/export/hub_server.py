"""A server that speaks what `create_repo` and `upload_folder` of huggingface_hub need, and keeps what it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class HubServer:
    """The server.

    Attributes:
        repos: `organisation/name` → private or not.
        branches: Names of branches made.
        files: Path in the repository → content, of the last commit.
        commits: Number of commits.
    """

    def __init__(self) -> None:
        self.repos: dict[str, bool] = {}
        self.branches: list[str] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.commits = 0
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()

    def commit(self, lines: list[dict[str, Any]]) -> None:
        """Applies a commit as the Hub's API has it, a line per file."""
        self.commits += 1
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        data = self._body()
        self.server_hub.large[hashlib.sha256(data).hexdigest()] = data
        self._answer(200, {})

    def do_GET(self) -> None:
        self._answer(404, {"error": "not here"})

    def do_POST(self) -> None:
        hub, body = self.server_hub, self._body()
        if self.path == "/api/validate-yaml":
            wrong = b"no-such-licence" in body
            errors = [{"message": '"license" must be one of the list'}] if wrong else []
            self._answer(400 if wrong else 200, {"errors": errors, "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in hub.repos
            hub.repos.setdefault(name, asked.get("private", False) or asked.get("visibility") == "private")
            self._answer(409 if known else 200, {"url": f"{hub.endpoint}/{name}"})
        elif "/branch/" in self.path:
            hub.branches.append(self.path.rpartition("/")[2])
            self._answer(200, {})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            files = [{**one, "uploadMode": mode[one["path"].endswith(".safetensors")]} for one in asked]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            found = []
            for one in json.loads(body)["objects"]:
                upload = {"href": f"{hub.endpoint}/large/{one['oid']}", "header": {}}
                found.append({"oid": one["oid"], "size": one["size"], "actions": {"upload": upload}})
            self._answer(200, {"transfer": "basic", "objects": found})
        elif "/commit/" in self.path:
            hub.commit([json.loads(line) for line in body.splitlines()])
            about = {
                "commitUrl": f"{hub.endpoint}/me/m/commit/{'a' * 40}",
                "commitOid": "a" * 40,
                "pullRequestUrl": None,
            }
            self._answer(200, about)
        else:
            self._answer(404, {"error": f"no {self.path}"})
