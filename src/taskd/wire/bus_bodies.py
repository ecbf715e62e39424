"""The JSON inside a bus message <-> the values of `taskd.model.messages`.

Every body is an envelope `{"msg_type", "code", "message", "extension"}`. The codes below 1000 are
Ascend's; there `message` and `extension` hold text, which may be JSON again. Our own messages have
codes from 1000 and hold their fields as one JSON object in `message`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from taskd.model import messages as m
from taskd.model.ids import Rank, Role
from taskd.wire.json_codec import TypeMismatch, from_plain, to_plain
from taskd.wire.json_reading import loads

REGISTER, STATUS, KEEP_ALIVE, ACTION = "REGISTER", "STATUS", "KEEP_ALIVE", "ACTION"

OUR_CODES: dict[int, type[m.Ours]] = {
    1001: m.WorkerHello,
    1002: m.WorkerFailed,
    1003: m.Parked,
    1004: m.Repaired,
    1005: m.RepairFailed,
    1006: m.Committed,
    1007: m.Dumped,
    1011: m.Park,
    1012: m.Repair,
    1013: m.Dump,
    1014: m.Leave,
    1015: m.RequestHello,
    1021: m.AgentHello,
    1022: m.WorkersStarted,
    1023: m.WorkerExited,
    1024: m.NodeHeartbeat,
    1031: m.ReplaceWorkers,
    1032: m.RestartJob,
    1033: m.EndJob,
    1034: m.NodeMarkedBad,
    1035: m.EndWorkers,
    1036: m.KeepShards,
}
_CODE_OF: dict[type, int] = {kind: code for code, kind in OUR_CODES.items()}
_PROFILING = {700: (False, False), 710: (True, False), 701: (False, True), 711: (True, True)}
_SWITCHED = {"switchOK": True, "switchFail": False}


class InvalidBody(ValueError):
    """The text is not an envelope, or its fields do not fit its code."""


EPOCH = "TaskdEpoch"
"""In the extension: the epoch of the manager that sends it. Ascend's peers ignore it."""


def encode(body: m.Body, epoch: int = 0) -> str:
    msg_type, code, message, extension = _envelope(body)
    extension = {**extension, EPOCH: str(epoch)} if epoch else dict(extension)
    return json.dumps(
        {"msg_type": msg_type, "code": code, "message": message, "extension": extension}
    )


def epoch_of(text: str) -> int:
    """The epoch of the manager that has sent this body; 0: it has none."""
    if EPOCH not in text:
        return 0
    envelope = _loads(text, "the body")
    extension = envelope.get("extension") if isinstance(envelope, dict) else None
    if not isinstance(extension, dict) or EPOCH not in extension:
        return 0
    return _number(str(extension[EPOCH]), "the epoch")


def decode(text: str, sender: str) -> m.Body:
    """`sender` is the role of the source: a code has another meaning in each direction."""
    envelope = _loads(text, "the body")
    if not isinstance(envelope, dict):
        raise InvalidBody("the body is not a JSON object")
    msg_type, code = envelope.get("msg_type"), envelope.get("code")
    message, extension = envelope.get("message"), envelope.get("extension") or {}
    if not isinstance(msg_type, str) or not isinstance(message, str):
        raise InvalidBody("msg_type and message must be text")
    if not isinstance(code, int) or isinstance(code, bool):
        raise InvalidBody(f"code must be a number, got {code!r}")
    if not _is_text_map(extension):
        raise InvalidBody("extension must map text to text")
    unknown = m.Unknown(msg_type, code, message, extension)
    if code in OUR_CODES:
        try:
            return from_plain(OUR_CODES[code], _loads(message, f"the message of {code}"))
        except TypeMismatch as misfit:
            raise InvalidBody(str(misfit)) from None
    if msg_type == ACTION and code in _PROFILING:
        return m.SetProfiling(*_PROFILING[code], _named(extension.get("Parts", "")))
    if msg_type == STATUS and 1400 <= code <= 1422 and code % 10 <= 2:
        return m.ProfilingSet(code // 10 % 10, code % 10)
    read = _READERS.get((msg_type, code, sender == Role.MANAGER))
    return read(message, extension, sender) if read else unknown


# Writing


def _envelope(body: m.Body) -> tuple[str, int, str, Mapping[str, str]]:
    if type(body) in _CODE_OF:
        plain = json.dumps(to_plain(body), separators=(",", ":"))
        return ACTION, _CODE_OF[type(body)], plain, {}
    match body:
        case m.AgentRegistered():
            return REGISTER, 0, "", {}
        case m.WorkerRegistered():
            return REGISTER, 101, "", {}
        case m.KeptAlive(ranks, times):
            return KEEP_ALIVE, 0, _report(ranks, times), {}
        case m.RestartsLeft(remaining):
            return STATUS, 201, str(remaining), {}
        case m.RanksFailed(ranks, at, times):
            when = {} if at is None else {"REPORT_FAULT_TIME": str(at)}
            return STATUS, 202, _report(ranks, times), when
        case m.ExitAgent():
            return ACTION, 203, "", {}
        case m.RestartAgent(remaining):
            return ACTION, 208, str(remaining), {}
        case m.RestartWorkers(ranks):
            return ACTION, 209, json.dumps(list(map(str, ranks))), {}
        case m.StartWorkers(remaining):
            return ACTION, 210, str(remaining), {}
        case m.StopWorkers(ranks):
            return ACTION, 213, json.dumps(list(map(str, ranks))), {}
        case m.SwitchNic(uuid, ranks, to_backup):
            extension = {
                "globalRankIDs": json.dumps(list(map(str, ranks))),
                "globalOps": json.dumps(list(to_backup)),
                "switchNicUUID": uuid,
            }
            return ACTION, 204, "", extension
        case m.NicSwitched(uuid, ok):
            return ACTION, 204, "switchOK" if ok else "switchFail", {"switchNicUUID": uuid}
        case m.RunStressTest(uuid, ops):
            per_rank = {str(rank): {"ops": list(which)} for rank, which in ops.items()}
            extension = {"StressTestRankOPStr": json.dumps(per_rank), "stressTestUUID": uuid}
            return ACTION, 205, "", extension
        case m.StressTested(uuid, results):
            per_op = {op: {"code": code, "result": text} for op, (code, text) in results.items()}
            return ACTION, 205, json.dumps({"rankResult": per_op}), {"stressTestUUID": uuid}
        case m.SetProfiling(default_domain, communication, parts):
            # Ascend's workers know only the two domains, and ignore the extension.
            named = {"Parts": ",".join(parts)} if parts else {}
            return ACTION, 700 + 10 * default_domain + communication, "", named
        case m.ProfilingSet(default_state, communication_state):
            return STATUS, 1400 + 10 * default_state + communication_state, "", {}
        case m.Unknown(msg_type, code, message, extension):
            return msg_type, code, message, extension
        case _:
            raise TypeError(f"{type(body).__name__} is not a message body")


def _report(ranks: tuple[Rank, ...], restart_times: int) -> str:
    return json.dumps({"fault_ranks": list(ranks), "restart_times": restart_times})


# Reading

Reader = Callable[[str, Mapping[str, str], str], m.Body]


def _read_keep_alive(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    if not message:
        return m.KeptAlive()
    ranks, times = _fault_ranks(message)
    return m.KeptAlive(ranks, times)


def _read_failed(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    ranks, times = _fault_ranks(message)
    at = extension.get("REPORT_FAULT_TIME")
    return m.RanksFailed(ranks, None if at is None else _number(at, "REPORT_FAULT_TIME"), times)


def _read_ranks(kind: type[m.RestartWorkers | m.StopWorkers]) -> Reader:
    def read(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
        # Upstream's manager sends 209 with an empty message and the ranks in the extension.
        if message and message != "null":
            ranks = _loads(message, "the rank list")
        else:
            faults = _loads(extension.get("FaultRanks") or "{}", "FaultRanks")
            ranks = list(faults) if isinstance(faults, dict) else faults
        return kind(_ranks(ranks))

    return read


def _read_switch_nic(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    ranks = _ranks(_loads(extension.get("globalRankIDs") or "[]", "globalRankIDs"))
    ops = _loads(extension.get("globalOps") or "[]", "globalOps")
    if not isinstance(ops, list) or not all(isinstance(op, bool) for op in ops):
        raise InvalidBody("globalOps must be a list of true and false")
    return m.SwitchNic(extension.get("switchNicUUID", ""), ranks, tuple(ops))


def _read_nic_switched(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    if message not in _SWITCHED:
        raise InvalidBody(f"expected switchOK or switchFail, got {message[:40]!r}")
    return m.NicSwitched(extension.get("switchNicUUID", ""), _SWITCHED[message])


def _read_stress_test(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    per_rank = _loads(extension.get("StressTestRankOPStr") or "{}", "StressTestRankOPStr")
    try:
        ops = {Rank(int(rank)): tuple(map(int, item["ops"])) for rank, item in per_rank.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise InvalidBody("StressTestRankOPStr must map ranks to lists of operations") from None
    return m.RunStressTest(extension.get("stressTestUUID", ""), ops)


def _read_stress_tested(message: str, extension: Mapping[str, str], sender: str) -> m.Body:
    reply = _loads(message, "the stress test's result")
    try:
        results = {
            str(op): (str(item["code"]), str(item["result"]))
            for op, item in reply["rankResult"].items()
        }
    except (AttributeError, KeyError, TypeError):
        raise InvalidBody("rankResult must map operations to a code and a result") from None
    return m.StressTested(extension.get("stressTestUUID", ""), results)


def _counted(kind: type[m.RestartsLeft | m.RestartAgent | m.StartWorkers]) -> Reader:
    return lambda message, extension, sender: kind(_number(message, "the restart budget"))


def _bare(kind: type[m.AgentRegistered | m.WorkerRegistered | m.ExitAgent]) -> Reader:
    return lambda message, extension, sender: kind()


_READERS: dict[tuple[str, int, bool], Reader] = {
    (REGISTER, 0, False): _bare(m.AgentRegistered),
    (REGISTER, 101, False): _bare(m.WorkerRegistered),
    (KEEP_ALIVE, 0, False): _read_keep_alive,
    (STATUS, 201, False): _counted(m.RestartsLeft),
    (STATUS, 202, False): _read_failed,
    (ACTION, 203, True): _bare(m.ExitAgent),
    (ACTION, 204, True): _read_switch_nic,
    (ACTION, 204, False): _read_nic_switched,
    (ACTION, 205, True): _read_stress_test,
    (ACTION, 205, False): _read_stress_tested,
    (ACTION, 208, True): _counted(m.RestartAgent),
    (ACTION, 209, True): _read_ranks(m.RestartWorkers),
    (ACTION, 210, True): _counted(m.StartWorkers),
    (ACTION, 213, True): _read_ranks(m.StopWorkers),
}


def _loads(text: str, what: str) -> Any:
    try:
        value = loads(text)
    except ValueError:
        raise InvalidBody(f"{what} is not JSON: {text[:40]!r}") from None
    return _without_surrogates(value) if _SURROGATE in text.lower() else value


_SURROGATE = "\\ud"
"""The start of an escaped surrogate in JSON; it occurs in file names of unknown encoding."""


def _without_surrogates(value: Any) -> Any:
    """Text with a lone surrogate cannot be encoded, so each becomes a question mark."""
    return loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(item, str) for key, item in value.items()
    )


def _named(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidBody(f"{what} is not a number: {text[:40]!r}") from None


def _ranks(ranks: object) -> tuple[Rank, ...]:
    if ranks is None:
        return ()
    if not isinstance(ranks, list):
        raise InvalidBody("the ranks must be a list")
    return tuple(Rank(_number(str(rank), "a rank")) for rank in ranks)


def _fault_ranks(message: str) -> tuple[tuple[Rank, ...], int]:
    report = _loads(message, "the fault report")
    if not isinstance(report, dict) or not isinstance(report.get("restart_times", -1), int):
        raise InvalidBody("the fault report must be an object with fault_ranks and restart_times")
    return _ranks(report.get("fault_ranks", [])), report.get("restart_times", -1)
