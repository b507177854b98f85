"""The part of `/apis/v2beta1` that recurring runs and uploaded pipelines use, beside that of `kfp_api`."""

from __future__ import annotations

import json
import re
import uuid
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.kfp_api import KfpApi
from tests.support.kfp_checks import ApiError

PATH = r"/apis/v2beta1/recurringruns(?:/([^/:]+))?"
PAGE = 2
"""Recurring runs in an answer, so that two answers are needed for three."""


class ScheduleApi(KfpApi):
    """A `KfpApi` that also keeps recurring runs.

    Attributes:
        recurring: Recurring runs by id, as the API shows them.
    """

    def __init__(self) -> None:
        self.recurring: dict[str, dict[str, Any]] = {}
        super().__init__()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        class Handler(super()._handler()):  # type: ignore[misc]
            def do_DELETE(self) -> None:  # noqa: N802
                self._answer("DELETE")

        return Handler

    def _route(
        self, method: str, path: str, query: dict[str, list[str]], headers: Message, body: bytes
    ) -> dict[str, Any] | str:
        match = re.fullmatch(PATH, path)
        if match is None:
            return super()._route(method, path, query, headers, body)
        if method == "POST":
            return self._create(json.loads(body))
        if method == "GET":
            return self._list(query)
        if self.recurring.pop(match[1], None) is None:
            raise ApiError(404, f"Recurring run {match[1]} not found.")
        return {}

    def _create(self, posted: dict[str, Any]) -> dict[str, Any]:
        run = {key: value for key, value in posted.items() if key != "trigger"}
        self._create_run(run)
        self.runs.clear()  # nothing runs until it is time
        cron = posted["trigger"]["cron_schedule"]["cron"]
        reason = "End of range (7) above maximum (6): 7" if cron.endswith(" 7") else "Expected 5 to 6 fields"
        if (len(cron.split()) != 6 and cron[0] != "@") or cron.endswith(" 7"):
            words = "Schedule cron is not a supported format(https://godoc.org/github.com/robfig/cron)."
            raise ApiError(400, f"Failed to create a recurring run: Invalid input error: {words} Error: {reason}")
        identifier = str(uuid.uuid4())
        status = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}[posted["mode"]]
        self.recurring[identifier] = {**posted, "recurring_run_id": identifier, "status": status}
        return self.recurring[identifier]

    def _list(self, query: dict[str, list[str]]) -> dict[str, Any]:
        text = query.get("filter", [""])[0]
        names = [each["stringValue"] for each in json.loads(text)["predicates"]] if text else []
        found = [run for run in self.recurring.values() if not names or run["display_name"] in names]
        start = int(query.get("page_token", ["0"])[0] or 0)
        answer: dict[str, Any] = {"recurringRuns": found[start : start + PAGE], "total_size": len(found)}
        return answer | ({"next_page_token": str(start + PAGE)} if start + PAGE < len(found) else {})
