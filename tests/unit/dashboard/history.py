"""Histories for tests, in the form in which clusterd gives them."""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson

from taskd.wire._pb import control_pb2 as pb

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class History:
    """Numbers and times grow by themselves."""

    def __init__(self) -> None:
        self.lines: list[pb.HistoryLine] = []
        self.at = 1_700_000_000_000

    def add(
        self, incident: int, before: str, after: str, because: str = "", event: str = "Tick()"
    ) -> None:
        self.at += 10
        self.lines.append(
            pb.HistoryLine(
                number=len(self.lines) + 1,
                at_unix_ms=self.at,
                incident=incident,
                before=before,
                after=after,
                because=because,
                event=event,
            )
        )

    def report(
        self,
        incident: int,
        outcome: str = "recovered",
        ranks: tuple[int, ...] = (2,),
        **more: object,
    ) -> None:
        report = pb.IncidentReport(
            job="job",
            incident=incident,
            strategy="recover-in-place",
            outcome=outcome,
            phases=[
                pb.Phase(name="seen", at_unix_ms=self.at - 100),
                pb.Phase(name="stopped", at_unix_ms=self.at - 60, took_ms=40.0),
                pb.Phase(name="step", at_unix_ms=self.at, took_ms=60.0),
            ],
            faults=[
                pb.IncidentFault(rank=r, node=1, host="b", cause="exited", evidence="signal 9")
                for r in ranks
            ],
        )
        report.MergeFrom(pb.IncidentReport(**more))  # type: ignore[arg-type]
        event = f"IncidentReport {MessageToJson(report, indent=None)}"
        self.add(incident, "Idle", "Idle", "ranks 2, …", event)

    def recovery(self, incident: int = 1, rank: int = 2) -> None:
        fault = f"FaultReport(faults=[Fault(rank={rank}, evidence=signal 9)])"
        self.add(incident, "Idle", "Stopping", f"fault of rank {rank} (signal 9)", fault)
        self.add(incident, "Stopping", "Negotiating", "all ranks are parked")
        chosen = "recover-in-place is chosen (retry: the job does not offer it)"
        self.add(incident, "Negotiating", "Replacing", chosen)
        self.add(incident, "Replacing", "Idle", "recover-in-place worked")
        self.add(incident, "Idle", "Idle", "there is nothing to handle")


def status(ranks: int = 4, per_node: int = 2) -> pb.JobStatus:
    return pb.JobStatus(
        line=pb.JobLine(job="job", name="job", state="Idle", step=41, steps_per_s=3.5, world=ranks),
        strategies=["retry", "recover-in-place"],
        ranks=[
            pb.RankStatus(
                rank=r, node=r // per_node, host="ab"[r // per_node % 2], phase="training"
            )
            for r in range(ranks)
        ],
        places=[
            pb.Place(rank=r, node=f"node{r // per_node}", device=str(r % per_node))
            for r in range(ranks)
        ],
        nodes=[
            pb.NodeStatus(node=n, host="ab"[n % 2], present=True, ranks=per_node, leader=n == 0)
            for n in range(ranks // per_node)
        ],
        goodput=0.97,
    )
