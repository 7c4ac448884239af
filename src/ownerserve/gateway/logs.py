"""The gateway's log tells an operator what happens to the fleet: workers up and down with the
cause, the directory lost, slow or refusing, and, if wanted, a line for each turn.

An entry is an event with fields, a line of text or of JSON:

    2026-11-23T01:28:03.120Z WARNING worker_down worker=10.0.0.7:8100 why=unreachable cause="..."
    {"time": "2026-11-23T01:28:03.120Z", "level": "warning", "event": "worker_down", ...}

It never has content of a request, nor a key; sessions are named by their digest, as everywhere.
What changes is told once, when it changes, however often it is seen. Stands on `logging` of the
standard library: entries of other libraries come in the same form, under the event `log`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from ownerserve.gateway.http.replies import RefusedRequest, Rejected
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.messages import Arm, Dispatch, Refuse
from ownerserve.router.requests.body import Usage
from ownerserve.router.worker import Receipt

log = logging.getLogger("ownerserve.gateway")

PATH_MAX_BYTES = 200
"""So much of a refused request's path is told."""
LEVELS = ("debug", "info", "warning", "error")


class LogFormat(StrEnum):
    """A log's format is how each entry is written."""

    TEXT = "text"
    JSON = "json"


def tell(level: int, event: str, **fields: object) -> None:
    """Write an entry: what happened, and to whom."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"event": event, "fields": fields})


def set_up(form: LogFormat, level: str) -> None:
    """Send this process's log to stderr in one form, from a level on; of other libraries, what is a
    warning at least."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("ownerserve").setLevel(level.upper())


def level_name() -> str:
    """Return the least that the log has now."""
    return logging.getLevelName(logging.getLogger("ownerserve").getEffectiveLevel()).lower()


def set_level(level: str) -> None:
    """Set the least that the log has from now on, and tell so."""
    former = level_name()
    if level != former:
        tell(logging.WARNING, "log_level", least=level, former=former)
        logging.getLogger("ownerserve").setLevel(level.upper())


def name_process(name: str) -> None:
    """Have every entry of this process say which of a gateway's it is, as the field `process`."""

    def named(record: logging.LogRecord) -> bool:
        record.fields = {**_fields(record), "process": name}
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(named)


class TextLines(logging.Formatter):
    """These lines are for people: time, level, event, then fields as NAME=VALUE."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as one line, and a trace of a fault below it."""
        said = [f"{_time(record)} {record.levelname} {_one_line(record.getMessage())}"]
        said += (f"{name}={_word(value)}" for name, value in _fields(record).items())
        line = " ".join(said)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """These lines are for programs: a JSON object each."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as one line."""
        event = getattr(record, "event", None)
        said: dict[str, object] = {"time": _time(record), "level": record.levelname.lower()}
        said |= {"event": event or "log", "logger": record.name}
        if event is None:
            said["message"] = record.getMessage()
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps({**said, **_fields(record)}, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(message: str) -> str:
    """Return a message without a control in it: what is quoted there may be a peer's."""
    if message.isprintable():
        return message
    return "".join([one if one.isprintable() else ascii(one)[1:-1] for one in message])


def _word(value: object) -> str:
    """Return a value as one word: quoted where it has a space, a quote or a control in it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


class WorkerLog:
    """The worker log tells when a worker comes up or goes down, and why; and when one that is up
    does not answer probes."""

    def __init__(self) -> None:
        self._up: dict[WorkerId, bool] = {}
        self._slow: set[WorkerId] = set()

    def up(self, worker: WorkerId, **fields: object) -> None:
        """Tell that a worker is up, unless that is known."""
        if not self._up.get(worker):
            self._up[worker] = True
            tell(logging.INFO, "worker_up", worker=worker, **fields)

    def down(self, worker: WorkerId, *, why: str, cause: str) -> None:
        """Tell that a worker is down, unless that is known."""
        if self._up.get(worker) is not False:
            self._up[worker] = False
            self._slow.discard(worker)
            tell(logging.WARNING, "worker_down", worker=worker, why=why, cause=cause or None)

    def slow(self, worker: WorkerId, *, unanswered_s: float) -> None:
        """Tell that a probe of a worker that is up is unanswered so far."""
        if self._up.get(worker) and worker not in self._slow:
            self._slow.add(worker)
            cause = f"no answer to the probe for {unanswered_s:g} s"
            tell(logging.WARNING, "worker_slow", worker=worker, cause=cause)

    def quick(self, worker: WorkerId) -> None:
        """Tell that a worker that was slow answers again; one that is down comes up instead."""
        if worker in self._slow:
            self._slow.discard(worker)
            tell(logging.INFO, "worker_answers", worker=worker)


_GOOD = ("session_is", "miss")
_LOST = ("unreachable", "failed")
_SLOW = ("too_slow", "not_asked", "not_awaited")


class DirectoryLog:
    """The directory log tells when what the directory answers changes in kind: well, lost (nobody
    answers), slow (turns go on without its answer), refusing (it answers with a no)."""

    def __init__(self) -> None:
        self.kind = "well"
        """What the answers of the last look that had some came to."""
        self._seen: Counter[str] = Counter()

    def look(self, answers: Counter[str]) -> None:
        """Compare all answers so far, by name, with those at the last look."""
        new, self._seen = answers - self._seen, Counter(answers)
        if not new:
            return
        kind = _kind_of(new)
        if kind == self.kind:
            return
        self.kind = kind
        level = logging.INFO if kind == "well" else logging.WARNING
        event = "directory_back" if kind == "well" else f"directory_{kind}"
        tell(level, event, **{name: new[name] for name in sorted(new)})


def _kind_of(new: Counter[str]) -> str:
    """Return what answers since the last look come to: the worst of them."""
    if any(new[name] for name in _LOST):
        return "lost"
    if any(new[name] for name in _SLOW):
        return "slow"
    return "well" if all(name in _GOOD for name in new) else "refuses"


class _Turn(msgspec.Struct, gc=False):
    """This is what an access line says before a turn's end is known; `began_s`: its first
    decision."""

    request_id: str
    trace_id: str | None
    began_s: float
    dispatch: Dispatch
    status: int | None = None
    first_byte_s: float | None = None


class AccessLog:
    """The access log has a line for each turn, at its end: the session's digest, where it ran and
    why, tokens, and times in seconds from the first decision on."""

    def __init__(self) -> None:
        self._turns: dict[Receipt, _Turn] = {}

    def decided(
        self,
        request_id: bytes,
        outcome: Dispatch | Refuse,
        *,
        session: SessionId | None,
        lost: Receipt | None,
        trace_id: str | None,
        now_s: float,
    ) -> None:
        """Note a dispatch, also of a turn whose last one was `lost`; write the line of a turn that
        is told no."""
        before = None if lost is None else self._turns.pop(lost, None)
        if isinstance(outcome, Dispatch):
            began_s = now_s if before is None else before.began_s
            told = request_id.decode("latin-1")
            self._turns[outcome.receipt] = _Turn(told, trace_id, began_s, outcome)
            return
        tell(
            logging.INFO, "turn", end="refused", reason=outcome.refusal.value, session=session,
            worker=None if before is None else before.dispatch.worker,
            attempt=None if before is None else before.dispatch.attempt,
            request_id=request_id.decode("latin-1"), trace_id=trace_id,
        )  # fmt: skip

    def refused(
        self,
        request: RefusedRequest,
        rejected: Rejected,
        *,
        session: SessionId | None,
        trace_id: str | None,
    ) -> None:
        """Write the line of a request that is told no before anything of it was decided."""
        path = request.target.partition(b"?")[0][:PATH_MAX_BYTES].decode("latin-1")
        tell(
            logging.INFO, "turn", end="refused", status=rejected.status.value,
            reason=rejected.code, limit=rejected.limit, session=session,
            tenant=request.tenant, client=request.client,
            method=request.method.decode("latin-1") or None, path=path or None,
            request_id=request.request_id.decode("latin-1"), trace_id=trace_id,
        )  # fmt: skip

    def began(self, receipt: Receipt, status: int, *, now_s: float) -> None:
        """Note the first byte of a turn's answer."""
        turn = self._turns.get(receipt)
        if turn is not None:
            turn.status, turn.first_byte_s = status, now_s - turn.began_s

    def ended(self, receipt: Receipt, end: str, *, usage: Usage | None, now_s: float) -> None:
        """Write the line of a turn that was sent."""
        turn = self._turns.pop(receipt, None)
        if turn is None:
            return
        dispatch, beside = turn.dispatch, turn.dispatch.decision.beside
        tell(
            logging.INFO, "turn", end=end, status=turn.status, session=dispatch.session,
            worker=dispatch.worker, reason=dispatch.reason.value,
            action=dispatch.decision.action.value, attempt=dispatch.attempt,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=usage.cached_tokens if usage and usage.tells_cached else None,
            output_tokens=None if usage is None else usage.output_tokens,
            expected_cached_tokens=dispatch.decision.cached_tokens,
            arm=None if dispatch.arm is Arm.MAIN else dispatch.arm.value,
            shadow_worker=None if beside is None else beside.worker.id,
            shadow_reason=None if beside is None else beside.reason.value,
            regret_ms=None if beside is None else round(beside.regret_ms, 3),
            first_byte_s=None if turn.first_byte_s is None else round(turn.first_byte_s, 6),
            duration_s=round(now_s - turn.began_s, 6), request_id=turn.request_id,
            trace_id=turn.trace_id,
        )  # fmt: skip
