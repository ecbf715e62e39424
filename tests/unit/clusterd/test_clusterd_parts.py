"""The small parts of clusterd: channels, rate limits, job limits, cluster objects."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.bus.late_reading import host_of
from taskd.clusterd.cluster.declared_jobs import Declaration, DeclaredNode, objects_of
from taskd.clusterd.cluster.in_memory import InMemoryCluster, version_of
from taskd.clusterd.cluster.interface import ClusterUnreachable, Json, Key, Kind, key_of, owner_of
from taskd.clusterd.cluster.objects import (
    DECLARED,
    DEVICE_KEYS,
    FAULT_JOB_INFO,
    facts_of,
    fault_job_info,
    reset_data,
)
from taskd.clusterd.faults.node_reports import InvalidReport, device_report, node_report
from taskd.clusterd.job_owner import JobOwner
from taskd.clusterd.job_registry import ABANDONED_S, JobRegistry, RegistryConfig
from taskd.clusterd.keyed_lock import KeyedLock
from taskd.clusterd.listeners import Channel, End
from taskd.clusterd.main import steady_wall
from taskd.clusterd.records.journal_records import Record
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.states import Negotiating, Stopping
from taskd.model.clusterd import (
    FaultReport,
    LabelPodGroup,
    RemoveFaultJobInfo,
    ResetOperation,
    StopReport,
    Subscribed,
)
from taskd.model.faults import Fault
from taskd.model.ids import JobId, Rank
from taskd.model.strategies import LADDER
from taskd.model.types import Tick
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import Write
from taskd.runtime.limits.rate_limit import Buckets, Rate
from tests.integration.clusterd.objects import device_fault, device_info


def test_new_listener_replaces_the_old_one() -> None:
    async def main() -> None:
        line: Channel[int] = Channel(2)
        line.put(0)
        first = line.open()
        line.put(1)
        second = line.open()
        line.put(2)
        assert await first.next(1.0) is End.TAKEN_OVER
        assert await second.next(1.0) == 2
        assert await second.next(0.0) is None
        assert not line.close(first)
        assert line.close(second)
        assert not line.connected

    asyncio.run(main())


def test_slow_listener_gets_its_backlog_before_it_is_dropped() -> None:
    async def main() -> None:
        line: Channel[int] = Channel(2)
        slow = line.open()
        line.put(1)
        line.put(2)
        assert line.full
        line.put(3)
        assert [await slow.next(1.0) for _ in range(3)] == [1, 2, End.TOO_SLOW]
        assert not line.connected

    asyncio.run(main())


def test_bucket_refills_over_time_and_can_go_negative() -> None:
    now = [0.0]
    buckets = Buckets(Rate(per_second=2, burst=4), keys=2, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(5)] == [True] * 4 + [False]
    now[0] = 1.0
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.take("b", cost=10)
    now[0] = 2.0
    assert not buckets.take("b")
    now[0] = 5.0
    assert buckets.take("b")


def test_number_of_buckets_is_limited() -> None:
    buckets = Buckets(Rate(1, 1), keys=100, clock=lambda: 0.0)
    for number in range(10_000):
        assert buckets.take(str(number))
    assert not buckets.take("9999")
    assert buckets.take("0")


@dataclass
class Caller:
    address: str

    def peer(self) -> str:
        """In gRPC's format."""
        return self.address


def test_callers_are_distinguished_by_their_whole_address() -> None:
    same = {host_of(Caller(f"ipv6:%5Bfd00::7%5D:{port}")) for port in (1024, 1025, 50_000)}
    assert len(same) == 1
    others = ["ipv6:%5Bfd00::8%5D:1024", "ipv6:%5Bfd01::7%5D:1024", "ipv4:10.0.0.7:1024"]
    assert len(same | {host_of(Caller(address)) for address in others}) == 4


def test_journal_clock_does_not_jump_with_the_wall_clock() -> None:
    wall, ticking = [1000.0], [5.0]
    clock = steady_wall(lambda: wall[0], lambda: ticking[0])
    wall[0], ticking[0] = 9.0, 8.0
    assert clock() == 1003.0


def test_keyed_lock_excludes_the_same_key_only() -> None:
    async def main() -> None:
        turns: KeyedLock[str] = KeyedLock()
        inside, order = 0, []
        came, gates = ({name: asyncio.Event() for name in "abc"} for _ in range(2))

        async def use(name: str) -> None:
            nonlocal inside
            async with turns.hold("key"):
                inside += 1
                assert inside == 1
                order.append(name)
                came[name].set()
                await gates[name].wait()
                inside -= 1

        first, second = asyncio.create_task(use("a")), asyncio.create_task(use("b"))
        await came["a"].wait()
        async with turns.hold("another"):
            assert order == ["a"]
        gates["a"].set()
        await first
        # The lock goes to "b", which does not hold it yet: "c" comes after it.
        third = asyncio.create_task(use("c"))
        await came["b"].wait()
        gates["b"].set()
        gates["c"].set()
        await asyncio.gather(second, third)
        assert order == ["a", "b", "c"]
        assert not len(turns)

    asyncio.run(main())


# Jobs


def make_jobs(
    now: list[float], journal: Journal, cluster: InMemoryCluster, **config: Any
) -> JobRegistry:
    limits = RegistryConfig(strategies=LADDER, **config)
    return JobRegistry(journal, cluster, lambda: now[0], limits, RecoveryConfig())


async def joined(jobs: JobRegistry, name: str) -> int:
    assert (await jobs.init(JobId(name))).code == 0
    return (await jobs.register(JobId(name))).code


def test_abandoned_job_makes_room() -> None:
    async def main() -> None:
        now = [0.0]
        journal = Journal(None)
        jobs = make_jobs(now, journal, InMemoryCluster(), max_jobs=2)
        await jobs.start()
        assert await joined(jobs, "a") == 0
        assert await joined(jobs, "b") == 0
        jobs.served[JobId("a")].signals.open()
        assert (await jobs.init(JobId("c"))).code == 500
        now[0] = ABANDONED_S + 1
        assert await joined(jobs, "c") == 0
        assert jobs.served.keys() == {"a", "c"}
        assert (await jobs.init(JobId("d"))).code == 500
        await jobs.close()
        await journal.aclose()

    asyncio.run(main())


def test_abandoned_job_of_before_a_restart_makes_room() -> None:
    async def main() -> None:
        now = [0.0]
        journal = Journal(None)
        for name in ("a", "b"):
            jobs = make_jobs(now, journal, InMemoryCluster(), max_jobs=1)
            await jobs.start()
            now[0] += ABANDONED_S + 1
            assert await joined(jobs, name) == 0
            await jobs.close()
        assert jobs.served.keys() == {"b"}
        await journal.aclose()

    asyncio.run(main())


class SlowJournal(Journal):
    """After its first write, its disk does not answer until `free` is set."""

    def __init__(self) -> None:
        super().__init__(None)
        self.free, self._used = asyncio.Event(), False

    async def append(self, write: Write) -> None:
        if self._used:
            await self.free.wait()
        self._used = True
        await super().append(write)


def test_report_that_comes_while_the_pods_of_a_new_job_are_written_starts_a_round() -> None:
    """The owner learns of its pods after its registration, when the journal has written them."""

    async def main() -> None:
        journal, cluster = SlowJournal(), InMemoryCluster()
        declared = Declaration(
            JobId("a"), "recover", "a", "team", nodes=(DeclaredNode(0, "host0", "uid", (0, 1)),)
        )
        for key, body in objects_of(declared):
            body["metadata"]["annotations"].pop(DECLARED, None)
            await cluster.create(key, body)
        jobs = make_jobs([0.0], journal, cluster)
        await jobs.start()
        assert await joined(jobs, "a") == 0
        owner, handled = jobs.served[JobId("a")], asyncio.Event()
        jobs.on_change.append(lambda _: handled.set())
        await handled.wait()  # the label that the registration has set
        handled.clear()
        report = device_info([device_fault("80E18005", "SeparateNPU", 0)])
        key = Key(Kind.CONFIG_MAP, "kube-system", "mindx-dl-deviceinfo-host0")
        cluster.set(key, {"metadata": {"name": key.name}, "data": {"DeviceInfoCfg": report}})
        await handled.wait()
        assert not owner.state.job.pods
        journal.free.set()
        news = owner.changes()
        async with asyncio.timeout(20):
            while owner.state.job.incident == 0:
                await news.wait()
                news.clear()
        await jobs.close()
        await journal.aclose()

    asyncio.run(main())


def test_ordered_writes_are_done_after_a_restart() -> None:
    """A write that was decided before a crash and not done is done once after the restart."""

    async def main() -> None:
        now = [0.0]
        journal, cluster = Journal(None), InMemoryCluster()
        jobs = make_jobs(now, journal, cluster)
        await jobs.start()
        await joined(jobs, "a")
        owner = jobs.served[JobId("a")]
        key = Key(Kind.POD_GROUP, "default", "a")
        command = LabelPodGroup("process-recover-enable", "pause", sequence=7)
        record = type(owner.record)(owner.state, (command,))
        await jobs.close()
        again = JobOwner(JobId("a"), record, jobs._context)
        news = again.changes()
        while again.record.undone:
            await news.wait()
            news.clear()
        body = cluster.get(key)
        assert body is not None
        assert body["metadata"]["labels"]["process-recover-enable"] == "pause"
        await again.close()
        await journal.aclose()

    asyncio.run(main())


class Away(InMemoryCluster):
    """A cluster that refuses the first writes."""

    refusals = 0

    async def patch(self, key: Key, patch: Mapping[str, Any], version: str | None = None) -> Json:
        if self.refusals:
            self.refusals -= 1
            raise ClusterUnreachable("the cluster is away")
        return await super().patch(key, patch, version)


@pytest.mark.parametrize("refusals", [2, 4])
def test_failed_cluster_write_is_retried_and_then_reported(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.clusterd.job_owner.WRITE_PAUSES_S", (0.0, 0.0, 0.0))

    async def main() -> None:
        journal, cluster = Journal(None), Away()
        jobs = make_jobs([0.0], journal, cluster)
        await jobs.start()
        await joined(jobs, "a")
        await cluster.create(FAULT_JOB_INFO, {"data": {"a": "{}", "b": "{}"}})
        state = jobs.served[JobId("a")].state
        await jobs.close()
        cluster.refusals = refusals
        again = JobOwner(
            JobId("a"), Record(state, (RemoveFaultJobInfo(sequence=7),)), jobs._context
        )
        news = again.changes()
        while again.record.undone:
            await news.wait()
            news.clear()
        left = (cluster.get(FAULT_JOB_INFO) or {})["data"]
        reasons = [entry.because for entry in await journal.history("a")]
        assert left == ({"b": "{}"} if refusals == 2 else {"a": "{}", "b": "{}"})
        assert any("the cluster is away" in because for because in reasons) == (refusals == 4)
        await again.close()
        await journal.aclose()

    asyncio.run(main())


def test_objects_are_read_again_only_when_one_has_changed() -> None:
    async def main() -> None:
        journal, cluster = Journal(None), InMemoryCluster()
        jobs = make_jobs([0.0], journal, cluster)
        await jobs.start()
        await joined(jobs, "a")
        await joined(jobs, "b")
        a, b = jobs.facts(JobId("a")), jobs.facts(JobId("b"))
        assert jobs.facts(JobId("a")) is a
        label = {"metadata": {"labels": {"framework": "mindspore"}}}
        await cluster.patch(Key(Kind.POD_GROUP, "default", "a"), label)
        changed = jobs.facts(JobId("a"))
        assert changed is not None
        assert changed.config.framework == "mindspore"
        assert jobs.facts(JobId("b")) is b
        await jobs.close()
        await journal.aclose()

    asyncio.run(main())


def test_a_deadline_that_passed_while_no_server_ran_waits_for_the_client() -> None:
    async def main() -> None:
        journal = Journal(None)
        jobs = make_jobs([0.0], journal, InMemoryCluster())
        await jobs.start()
        await joined(jobs, "a")
        owner = jobs.served[JobId("a")]
        await owner.ask(FaultReport((Fault(Rank(1)),)))
        await jobs.close()
        state = owner.state
        assert isinstance(state, Stopping)
        late = Record(replace(state, deadline=-1.0))
        again = JobOwner(JobId("a"), late, jobs._context)
        assert (await again.ask(Subscribed())).code == 0
        assert (await again.ask(StopReport(0))).code == 0
        assert isinstance(again.state, Negotiating)
        await again.close()
        await journal.aclose()

    asyncio.run(main())


# Objects


def pod(**changes: Any) -> dict[str, Any]:
    devices = {
        "super_pod_id": "4",
        "devices": [{"device_id": "0", "rank_id": "2", "super_device_id": "77"}],
    }
    return {
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "uid": "u",
            "annotations": {
                "hccl/rankIndex": "0",
                "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(devices),
            },
        },
        "spec": {
            "nodeName": "n",
            "containers": [{"env": [{"name": "MINDIO_WAIT_MINDX_TIME", "value": "40"}]}],
        },
        **changes,
    }


GROUP = {
    "kind": "PodGroup",
    "metadata": {"name": "g", "annotations": {"recover-strategy": " dump"}},
}


def test_facts_are_read_from_incomplete_objects() -> None:
    strange = [
        pod(),
        pod(metadata={"name": "q", "annotations": None}),
        pod(metadata={"name": "r", "annotations": {"hccl/rankIndex": "x"}}),
        pod(spec={}, status={"phase": "Pending"}),
    ]
    facts = facts_of(GROUP, strange)
    assert facts.config.super_pod
    assert facts.config.resources_timeout_s == 30.0
    assert [p.ranks for p in facts.pods] == [(2,), (2,)]
    assert not facts.enabled


def test_reset_config_counts_retries_and_respects_a_hot_reset() -> None:
    before = {"reset.json": json.dumps({"RetryTime": 4, "RankList": None})}
    again = reset_data(before, ResetOperation.RESTART_ALL, (), again=False, now=9)
    assert json.loads(again["reset.json"])["RetryTime"] == 5
    fault = reset_data(before, ResetOperation.FAULT, (3,), again=True, now=9)
    content = json.loads(fault["reset.json"])
    assert (content["RankList"][0]["RankId"], content["RestartFaultProcess"]) == (3, True)
    assert list(content) == [
        *("RankList", "UpdateTime", "RetryTime", "FaultFlushing", "GracefulExit"),
        "RestartFaultProcess",
    ]
    busy = {"reset.json": json.dumps({"RankList": [{"Policy": "restart"}]})}
    with pytest.raises(ValueError, match="hot reset"):
        reset_data(busy, ResetOperation.CLEAR, (), again=False, now=9)
    with pytest.raises(ValueError, match="not valid JSON"):
        reset_data({}, ResetOperation.CLEAR, (), again=False, now=9)


def test_fault_job_info_lists_what_a_super_pod_must_release() -> None:
    other = pod(spec={"nodeName": "m"})
    content = json.loads(fault_job_info(facts_of(GROUP, [pod()]), [pod(), other], ["n"], 5))
    assert content["4"]["SdIds"] == ["77"]
    assert content["4"]["FaultNodes"] == {"n": {}}
    assert content["4"]["NodeNames"] == ["m"]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"DeviceInfoCfg": "{"},
        {"DeviceInfoCfg": "[]"},
        {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": {"a-Fault": "x"}}})},
        {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": {"a-Fault": "[1]"}}})},
    ],
)
def test_invalid_device_report_has_no_faults(data: dict[str, str]) -> None:
    with pytest.raises(InvalidReport):
        device_report("n", {"data": data})


REPORT = (
    '{"DeviceInfo":{"DeviceList":{"huawei.com/Ascend910":"Ascend910-0",'
    '"huawei.com/Ascend910-Fault":"[{\\"npu_name\\":\\"a \\u003c b \\u0026 ü\\"}]"},'
    '"UpdateTime":1700000000},"SuperPodID":-1,"ServerIndex":-1,"CheckCode":"CODE"}'
)
"""In Go's JSON."""


def checked(report: str) -> dict[str, Any]:
    device_info = report[len('{"DeviceInfo":') : report.index(',"SuperPodID"')]
    code = hashlib.sha256(device_info.encode()).hexdigest()
    return {"data": {"DeviceInfoCfg": report.replace("CODE", code)}}


def is_valid(body: Json) -> bool:
    try:
        device_report("n", body)
    except InvalidReport:
        return False
    return True


def test_device_report_is_valid_if_its_check_code_matches() -> None:
    whole = checked(REPORT)
    assert is_valid(whole)
    text = whole["data"]["DeviceInfoCfg"]
    for damaged in (
        text.replace("Ascend910-0", "Ascend910-1"),
        text.replace("1700000000", "1700000001"),
        text.replace('"CheckCode":"', '"CheckCode":"0'),
        text.replace("CheckCode", "Other"),
        REPORT.replace("CODE", ""),
    ):
        assert not is_valid({"data": {"DeviceInfoCfg": damaged}})
    # Spaces and the order of keys do not matter.
    again = json.dumps(json.loads(text), indent=1, sort_keys=True)
    assert is_valid({"data": {"DeviceInfoCfg": again}})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["on", "0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("labels", "annotations", "ownerReferences", "controller", "uid", "name"),
                    *("recover-strategy", "hccl/rankIndex", "devices", "rank_id", "containers"),
                    *("env", "value", "volumeMounts", "mountPath", "phase", "nodeName", "data"),
                    *(
                        "DeviceInfoCfg",
                        "SwitchInfoCfg",
                        "NodeInfo",
                        "reset.json",
                        "resourceVersion",
                        *DEVICE_KEYS,
                    ),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
OBJECTS = st.fixed_dictionaries(
    {}, optional={name: ANYTHING for name in ("metadata", "spec", "status", "data")}
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(OBJECTS, st.lists(OBJECTS, max_size=2))
def test_objects_with_any_content_are_read(group: Any, pods: list[Any]) -> None:
    """Files may contain anything: invalid content is refused or skipped."""
    whole = {"kind": "PodGroup", **group}
    metadata = whole.get("metadata")
    whole["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "name": "g"}
    with suppress(ValueError):
        facts = facts_of(whole, pods)
        fault_job_info(facts, pods, ["n"], 1)
    for body in (whole, *pods):
        owner_of(body)
        version_of(body)
        for read in (device_report, node_report):
            with suppress(InvalidReport):
                read("n", body)
        with suppress(ValueError):
            key_of(body)
        with suppress(ValueError):
            reset_data(body.get("data"), ResetOperation.FAULT, (1,), again=True, now=1)


def test_internal_error_costs_one_event(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        journal = Journal(None)
        jobs = make_jobs([0.0], journal, InMemoryCluster())
        await jobs.start()
        await joined(jobs, "a")
        owner = jobs.served[JobId("a")]
        unheard_of: Any = "not an event at all"
        assert (await owner.ask(unheard_of)).code == 599
        assert (await owner.ask(Tick())).code == 0
        await jobs.close()
        await journal.aclose()

    asyncio.run(main())
    assert "cannot decide" in caplog.text


def test_clock_set_back_does_not_lengthen_waits(caplog: pytest.LogCaptureFixture) -> None:
    clock = steady_wall(lambda: 1_000.0, lambda: 5.0, not_before=9_000.0)
    assert clock() == 9_000.0
    assert "set back by 8000 s" in caplog.text
