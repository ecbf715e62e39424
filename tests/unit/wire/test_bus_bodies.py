"""Bodies survive the wire in both directions, upstream's spelling is exact, garbage is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Role, Step
from taskd.wire.bus_bodies import OUR_CODES, InvalidBody, decode, encode, epoch_of

UP, DOWN = Role.AGENT, Role.MANAGER
MEMBER = m.Member(Rank(1), NodeRank(0), Incarnation(2))


@pytest.mark.parametrize(
    ("sender", "body", "text"),
    [
        (UP, m.AgentRegistered(), ("REGISTER", 0, "", {})),
        (UP, m.WorkerRegistered(), ("REGISTER", 101, "", {})),
        (UP, m.KeptAlive(), ("KEEP_ALIVE", 0, '{"fault_ranks": [], "restart_times": -1}', {})),
        (UP, m.RestartsLeft(32767), ("STATUS", 201, "32767", {})),
        (
            UP,
            m.RanksFailed((Rank(9), Rank(11)), 1735689600),
            (
                "STATUS",
                202,
                '{"fault_ranks": [9, 11], "restart_times": -1}',
                {"REPORT_FAULT_TIME": "1735689600"},
            ),
        ),
        (DOWN, m.ExitAgent(), ("ACTION", 203, "", {})),
        (DOWN, m.RestartAgent(32766), ("ACTION", 208, "32766", {})),
        (DOWN, m.RestartWorkers((Rank(9), Rank(11))), ("ACTION", 209, '["9", "11"]', {})),
        (DOWN, m.StartWorkers(32767), ("ACTION", 210, "32767", {})),
        (DOWN, m.StopWorkers((Rank(9),)), ("ACTION", 213, '["9"]', {})),
        (
            DOWN,
            m.SwitchNic("u1", (Rank(8), Rank(9)), (True, False)),
            (
                "ACTION",
                204,
                "",
                {
                    "globalRankIDs": '["8", "9"]',
                    "globalOps": "[true, false]",
                    "switchNicUUID": "u1",
                },
            ),
        ),
        (UP, m.NicSwitched("u1", True), ("ACTION", 204, "switchOK", {"switchNicUUID": "u1"})),
        (
            DOWN,
            m.RunStressTest("u2", {Rank(9): (0, 1)}),
            (
                "ACTION",
                205,
                "",
                {"StressTestRankOPStr": '{"9": {"ops": [0, 1]}}', "stressTestUUID": "u2"},
            ),
        ),
        (
            UP,
            m.StressTested("u2", {"0": ("0", "OK")}),
            (
                "ACTION",
                205,
                '{"rankResult": {"0": {"code": "0", "result": "OK"}}}',
                {"stressTestUUID": "u2"},
            ),
        ),
        (DOWN, m.SetProfiling(True, False), ("ACTION", 710, "", {})),
        (DOWN, m.SetProfiling(False, True), ("ACTION", 701, "", {})),
        (UP, m.ProfilingSet(1, 2), ("STATUS", 1412, "", {})),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "__dataclass_fields__") else "",
)
def test_ascend_messages_have_ascends_encoding(
    sender: str, body: m.Body, text: tuple[str, int, str, dict[str, str]]
) -> None:
    envelope = dict(zip(("msg_type", "code", "message", "extension"), text, strict=True))
    assert json.loads(encode(body)) == envelope
    assert decode(json.dumps(envelope), sender) == body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"msg_type":"ACTION","code":203,"message":"","extension":null}',
            m.ExitAgent(),
        ),
        (
            '{"msg_type":"ACTION","code":213,"message":"null","extension":null}',
            m.StopWorkers(()),
        ),
        (
            '{"msg_type":"ACTION","code":209,"message":"","extension":{"FaultRanks":"{\\"3\\":1}"}}',
            m.RestartWorkers((Rank(3),)),
        ),
        (
            '{"msg_type":"ACTION","code":777,"message":"x","extension":{"a":"b"}}',
            m.Unknown("ACTION", 777, "x", {"a": "b"}),
        ),
    ],
)
def test_variants_sent_by_ascend_are_decoded(text: str, expected: m.Body) -> None:
    assert decode(text, Role.MANAGER) == expected


OURS: list[m.Ours] = [
    m.WorkerHello(Rank(1), NodeRank(0), Incarnation(2), 77, Incident(3), Step(9), "training", True),
    m.WorkerFailed(Rank(1), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer 2 closed"),
    m.Parked(Rank(1), Incarnation(0), Incident(1), Step(7), True),
    m.Repaired(Rank(1), Incarnation(0), Incident(1), Step(7)),
    m.RepairFailed(Rank(1), Incarnation(0), Incident(1), "checksum"),
    m.Committed(Rank(1), Incarnation(0), Incident(1), Step(8)),
    m.Dumped(Rank(1), Incident(1), Step(8)),
    m.Park(Incident(1), "rank 2 died"),
    m.Repair(Incident(1), "retry", (MEMBER,), Step(7), {Rank(1): Rank(0)}, "127.0.0.1:1", 5.0),
    m.Dump(Incident(1), Step(7), "/ckpt", (MEMBER,)),
    m.Leave(Incident(1), "the node is replaced"),
    m.RequestHello(),
    m.AgentHello(NodeRank(0), "h", (m.LocalWorker(Rank(1), Incarnation(0), 7),), "127.0.0.1:2"),
    m.WorkersStarted(NodeRank(0), (m.LocalWorker(Rank(1), Incarnation(0), 7),)),
    m.WorkerExited(Rank(1), Incarnation(0), 7, None, 9, "killed"),
    m.NodeHeartbeat(NodeRank(0), (m.Progress(Rank(1), Incarnation(0), Step(3), 0.5, True, 12),)),
    m.ReplaceWorkers(Incident(1), (MEMBER,)),
    m.EndWorkers((MEMBER,)),
    m.KeepShards((m.RankShard(Rank(3), "1/2.ab", 0),)),
    m.RestartJob(Incident(1), 2, (MEMBER,)),
    m.EndJob(0, "every rank has finished"),
    m.NodeMarkedBad("rank 2: 1 of 9 products were wrong"),
]


@pytest.mark.parametrize("body", OURS, ids=lambda body: type(body).__name__)
def test_our_messages_survive_encoding(body: m.Ours) -> None:
    assert decode(encode(body), "anyone") == body


@pytest.mark.parametrize("body", [*OURS, m.SetProfiling(True, False, ("step",))])
def test_epoch_travels_with_each_order(body: m.Body) -> None:
    text = encode(body, 7)
    assert epoch_of(text) == 7
    assert decode(text, Role.MANAGER) == body
    assert epoch_of(encode(body)) == 0


def test_epoch_that_is_not_a_number_is_refused() -> None:
    text = encode(m.RequestHello(), 7).replace('"7"', '"x"')
    with pytest.raises(InvalidBody, match="epoch"):
        epoch_of(text)


def test_each_of_our_messages_has_a_code_and_a_sample() -> None:
    kinds = set(get_args(m.Ours))
    assert kinds == set(OUR_CODES.values()) == {type(body) for body in OURS}
    assert all(code >= 1000 for code in OUR_CODES)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"msg_type":1,"code":0,"message":"","extension":{}}', "must be text"),
        ('{"msg_type":"ACTION","code":true,"message":"","extension":{}}', "must be a number"),
        ('{"msg_type":"ACTION","code":1,"message":"","extension":{"a":1}}', "text to text"),
        ('{"msg_type":"STATUS","code":201,"message":"x","extension":{}}', "not a number"),
        ('{"msg_type":"STATUS","code":202,"message":"[]","extension":{}}', "fault report"),
        ('{"msg_type":"ACTION","code":1011,"message":"{}","extension":{}}', "incident is missing"),
        (
            '{"msg_type":"ACTION","code":1011,"message":"{\\"incident\\":\\"x\\"}","extension":{}}',
            "Park.incident: expected int",
        ),
    ],
)
def test_invalid_body_is_refused_with_the_reason(text: str, because: str) -> None:
    with pytest.raises(InvalidBody, match=because):
        decode(text, Role.AGENT)


@pytest.mark.parametrize(
    ("code", "extension"),
    [
        (209, {"FaultRanks": "5"}),
        (205, {"StressTestRankOPStr": '{"1": {"ops": [Infinity]}}'}),
    ],
)
def test_invalid_order_is_refused(code: int, extension: dict[str, str]) -> None:
    text = {"msg_type": "ACTION", "code": code, "message": "", "extension": extension}
    with pytest.raises(InvalidBody):
        decode(json.dumps(text), Role.MANAGER)


def test_number_too_large_for_a_float_is_refused() -> None:
    text = encode(m.Repaired(Rank(1), Incarnation(0), Incident(1), Step(7), 0.5))
    with pytest.raises(InvalidBody, match="too large"):
        decode(text.replace("0.5", "1" + "0" * 400), Role.WORKER)


def test_lone_surrogate_becomes_a_question_mark() -> None:
    failed = m.WorkerFailed(
        Rank(1), Incarnation(0), Incident(0), FaultCause.EXCEPTION, "caf\udce9, 🦜"
    )
    decoded = decode(encode(failed), Role.WORKER)
    assert isinstance(decoded, m.WorkerFailed)
    assert decoded.evidence == "caf?, 🦜"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(
    msg_type=st.sampled_from(["REGISTER", "STATUS", "KEEP_ALIVE", "ACTION"]) | JSON,
    code=st.sampled_from([0, 101, *range(200, 214), 700, 1411, *OUR_CODES]) | JSON,
    message=st.text(max_size=30) | JSON.map(json.dumps),
    extension=JSON
    | st.dictionaries(
        st.sampled_from(["FaultRanks", "globalRankIDs", "globalOps", "StressTestRankOPStr"]),
        JSON.map(json.dumps),
    ),
    sender=st.sampled_from(list(Role)),
)
def test_any_envelope_is_decoded_or_refused(
    msg_type: object, code: object, message: object, extension: object, sender: str
) -> None:
    envelope = {"msg_type": msg_type, "code": code, "message": message, "extension": extension}
    with suppress(InvalidBody):
        encode(decode(json.dumps(envelope), sender))


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_decoded_or_refused(text: str) -> None:
    with suppress(InvalidBody):
        decode(text, Role.WORKER)
