"""Between faults and the messages of the services Fault and PubFault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from taskd.core.clusterd.fault_centre.fault_levels import level_of, worst, worst_health
from taskd.core.clusterd.fault_centre.public_faults import Influence, PublicFault, PublicReport
from taskd.model.node_faults import SWITCH, NodeFault
from taskd.wire._pb import fault_pb2 as pb
from taskd.wire._pb import pubfault_pb2

FAULT, NORMAL = "fault", "normal"


def fault_signal(
    uuid: str, job: str, faults: Iterable[NodeFault], addresses: Mapping[str, tuple[str, str]]
) -> pb.FaultMsgSignal:
    """`addresses`: address and serial number of each node, where they are known."""
    ordered = sorted(faults, key=lambda fault: fault.node)
    nodes = [
        _node(node, list(found), *addresses.get(node, ("", "")))
        for node, found in groupby(ordered, lambda fault: fault.node)
    ]
    nodes.sort(key=lambda node: (node.nodeIP, node.nodeName))
    kind = FAULT if nodes else NORMAL
    return pb.FaultMsgSignal(uuid=uuid, jobId=job, signalType=kind, nodeFaultInfo=nodes)


def _node(name: str, faults: list[NodeFault], address: str, serial: str) -> pb.NodeFaultInfo:
    devices: dict[tuple[str, str], list[NodeFault]] = {}
    for fault in faults:
        devices.setdefault((fault.device, fault.part), []).append(fault)
    return pb.NodeFaultInfo(
        nodeName=name,
        nodeIP=address,
        nodeSN=serial,
        faultLevel=worst_health(map(level_of, faults)).value,
        faultDevice=[_device(*key, found) for key, found in sorted(devices.items())],
    )


def _device(device: str, part: str, faults: list[NodeFault]) -> pb.DeviceFaultInfo:
    levels: dict[str, str] = {}
    for fault in faults:
        levels[fault.code] = worst((levels.get(fault.code, ""), fault.level))
    codes = sorted(levels)
    return pb.DeviceFaultInfo(
        deviceId=device,
        deviceType=part,
        faultCodes=codes,
        faultLevel=worst_health(map(level_of, faults)).value,
        faultLevels=[levels[code] for code in codes],
        switchFaultInfos=[
            pb.SwitchFaultInfo(
                faultCode=fault.code,
                switchChipId=fault.chip,
                switchPortId=fault.port,
                faultTime=str(round(fault.since)),
                faultLevel=fault.level,
            )
            for fault in faults
            if fault.part == SWITCH
        ],
    )


# Public faults, from the service or from a ConfigMap


def public_report(
    request: pubfault_pb2.PublicFaultRequest, node_of: Callable[[str], str]
) -> PublicReport:
    """`node_of` gives the name of the node with a serial number, or an empty text."""
    return PublicReport(
        id=request.id,
        timestamp_ms=request.timestamp,
        version=request.version,
        resource=request.resource,
        faults=tuple(_public_fault(fault, node_of) for fault in request.faults),
    )


def _public_fault(fault: pubfault_pb2.Fault, node_of: Callable[[str], str]) -> PublicFault:
    return PublicFault(
        id=fault.faultId,
        type=fault.faultType,
        code=fault.faultCode,
        time_ms=fault.faultTime,
        assertion=fault.assertion,
        location=dict(fault.faultLocation),
        influence=tuple(
            Influence(one.nodeName or node_of(one.nodeSN), one.nodeSN, tuple(one.deviceIds))
            for one in fault.influence
        ),
        description=fault.description,
    )
