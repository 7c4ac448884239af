"""Cases that schemathesis makes of the admin API's own description, asked of a running gateway:
what the description allows, and what it forbids."""

from __future__ import annotations

from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class AdminCases:
    """Asks cases of the gateway whose admin port is at `url`. Half of those that name a worker name
    one of `workers`, so that something is changed; one that left joins again."""

    def __init__(self, url: str, workers: list[str], *, number: int) -> None:
        self.seen: Counter[str] = Counter()
        """Answers by operation and status."""
        self._url = url
        self._workers = workers
        self._number = number
        self._session = requests.Session()

    def ask(self, cases: int) -> None:
        """Ask at least so many cases. What does not conform raises."""
        schema = schemathesis.openapi.from_url(f"{self._url}/openapi.json")
        rows = [found.ok() for found in schema.get_all_operations()]
        varied = [row for row in rows if row.query or row.path_parameters or row.body]
        for row in rows:
            self._ask(row, GenerationMode.POSITIVE, 1)
        while (left := cases - self.seen.total()) > 0:
            share = max(left // len(varied) // 2, 1)
            for row in varied:
                self._ask(row, GenerationMode.POSITIVE, share)
                self._ask(row, GenerationMode.NEGATIVE, share)
            self._number += 1

    def _ask(self, row: Any, mode: GenerationMode, cases: int) -> None:
        @seed(self._number)
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=row.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            number = self.seen.total()
            name = self._workers[number // 2 % len(self._workers)]
            if number % 2 and "worker" in (case.path_parameters or {}):
                case.path_parameters["worker"] = name
            if number % 2 and row.path == "/workers" and isinstance(case.body, dict):
                case.body["url"] = f"http://{name}"
            answer = case.call(session=self._session)
            case.validate_response(answer, checks=CHECKS)
            self.seen[f"{row.method.upper()} {row.path} {answer.status_code}"] += 1
            if answer.status_code == requests.codes.accepted:
                self._session.post(f"{self._url}/workers", json={"url": f"http://{name}"})

        try:
            ask()
        except Unsatisfiable:  # nothing is forbidden there: a path takes every text
            assert mode is GenerationMode.NEGATIVE
