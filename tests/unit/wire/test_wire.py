"""The wire is a promise to peers we do not control: names, numbers and methods stay as they are."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from taskd.model import codes
from taskd.wire._pb import (
    config_pb2,
    fault_pb2,
    job_pb2,
    link_pb2,
    profiling_pb2,
    pubfault_pb2,
    recover_pb2,
    tasknet_pb2,
)
from tests import ROOT

TASKNET = """
TaskNet/Register RegisterReq -> Ack
TaskNet/PathDiscovery PathDiscoveryReq -> Ack
TaskNet/TransferMessage Message -> Ack
TaskNet/InitServerDownStream stream Ack -> stream Message
Position role=1 serverRank=2 processRank=3
RegisterReq uuid=1 pos=2
PathDiscoveryReq uuid=1 proxyPos=2 path=3
MessageHeader uuid=1 mtype=2 sync=3 src=4 dst=5 createTime=6
Message header=1 body=2
Ack uuid=1 code=2 src=3
"""

RECOVER = """
Recover/Init ClientInfo -> Status
Recover/Register ClientInfo -> Status
Recover/SubscribeProcessManageSignal ClientInfo -> stream ProcessManageSignal
Recover/ReportStopComplete StopCompleteRequest -> Status
Recover/ReportRecoverStrategy RecoverStrategyRequest -> Status
Recover/ReportRecoverStatus RecoverStatusRequest -> Status
Recover/ReportProcessFault ProcessFaultRequest -> Status
Recover/SwitchNicTrack SwitchNics -> Status
Recover/SubscribeSwitchNicSignal SwitchNicRequest -> stream SwitchNicResponse
Recover/SubscribeNotifySwitch ClientInfo -> stream SwitchRankList
Recover/ReplySwitchNicResult SwitchResult -> Status
Recover/HealthCheck ClientInfo -> Status
Recover/StressTest StressTestParam -> Status
Recover/SubscribeStressTestResponse StressTestRequest -> stream StressTestResponse
Recover/SubscribeNotifyExecStressTest ClientInfo -> stream StressTestRankParams
Recover/ReplyStressTestResult StressTestResult -> Status
Status code=1 info=2
ClientInfo jobId=1 role=2
FaultRank rankId=1 faultType=2
ProcessManageSignal uuid=1 jobId=2 signalType=3 actions=4 faultRanks=5 changeStrategy=6 timeout=7 \
nodeRankIds=8 extraParams=9
StopCompleteRequest jobId=1 status=2 faultRanks=3
RecoverStrategyRequest jobId=1 faultRanks=2 strategies=3
RecoverStatusRequest jobId=1 status=2 strategy=3 isolateRankIds=4
ProcessFaultRequest jobId=1 faultRanks=2
SwitchNicResponse jobID=1 msg=2
SwitchNicRequest jobID=1
SwitchNics jobID=1 nicOps=2
DeviceList dev=1 op=2
SwitchRankList rankID=1 op=2 jobId=3
SwitchResult jobId=1 result=2
StressOpList ops=1
StressTestParam jobID=1 stressParam=2 allNodesOps=3
StressTestRequest jobID=1
StressTestResponse jobID=1 msg=2
StressTestRankParams stressParam=1 jobId=2
StressTestResult jobId=1 stressResult=2
StressTestRankResult rankResult=1
StressTestOpResult code=1 result=2
"""

PROFILING = """
TrainingDataTrace/ModifyTrainingDataTraceSwitch DataTypeReq -> DataTypeRes
TrainingDataTrace/GetTrainingDataTraceSwitch DataStatusReq -> DataStatusRes
TrainingDataTrace/SubscribeDataTraceSwitch ProfilingClientInfo -> stream DataStatusRes
ProfilingClientInfo jobId=1 role=2
ProfilingSwitch CommunicationOperator=1 Step=2 SaveCheckpoint=3 FP=4 DataLoader=5
DataStatusReq jobNsName=1
DataStatusRes message=1 profilingSwitch=2 code=3
DataTypeReq jobNsName=1 profilingSwitch=2
DataTypeRes message=1 code=2
"""

PUBFAULT = """
PubFault/SendPublicFault PublicFaultRequest -> RespStatus
RespStatus code=1 info=2
PublicFaultRequest id=1 timestamp=2 version=3 resource=4 faults=5
Fault faultId=1 faultType=2 faultCode=3 faultTime=4 assertion=5 faultLocation=6 influence=7 \
description=8
PubFaultInfo nodeName=1 nodeSN=2 deviceIds=3
"""

FAULT = """
fault.Fault/Register fault.ClientInfo -> fault.Status
fault.Fault/SubscribeFaultMsgSignal fault.ClientInfo -> stream fault.FaultMsgSignal
fault.Fault/GetFaultMsgSignal fault.ClientInfo -> fault.FaultQueryResult
fault.Status code=1 info=2
fault.ClientInfo jobId=1 role=2
fault.FaultQueryResult code=1 info=2 faultSignal=3
fault.FaultMsgSignal uuid=1 jobId=2 signalType=3 nodeFaultInfo=4
fault.NodeFaultInfo nodeName=1 nodeIP=2 nodeSN=3 faultLevel=4 faultDevice=5
fault.SwitchFaultInfo faultCode=1 switchChipId=2 switchPortId=3 faultTime=4 faultLevel=5
fault.DeviceFaultInfo deviceId=1 deviceType=2 faultCodes=3 faultLevel=4 faultType=5 faultReason=6 \
switchFaultInfos=7 faultLevels=8
"""

JOB = """
job.Job/Register job.ClientInfo -> job.Status
job.Job/SubscribeJobSummarySignal job.ClientInfo -> stream job.JobSummarySignal
job.Job/SubscribeJobSummarySignalList job.ClientInfo -> stream job.JobSummarySignalList
job.ClientInfo role=1 clientId=3
job.Status code=1 info=2 clientId=3
job.JobSummarySignal uuid=1 jobId=2 jobName=3 namespace=4 frameWork=5 jobStatus=6 time=7 \
cmIndex=8 total=9 HcclJson=10 deleteTime=11 sharedTorIp=12 masterAddr=13 operator=14 sid=15
job.JobSummarySignalList jobSummarySignals=1 ReportTime=2 JobTotalNum=3
"""

CONFIG = """
config.Config/Register config.ClientInfo -> config.Status
config.Config/SubscribeRankTable config.ClientInfo -> stream config.RankTableStream
config.Status code=1 info=2
config.ClientInfo jobId=1 role=2
config.RankTableStream jobId=1 rankTable=2
"""


@pytest.mark.parametrize(
    ("file", "promised"),
    [
        pytest.param(tasknet_pb2.DESCRIPTOR, TASKNET, id="tasknet"),
        pytest.param(recover_pb2.DESCRIPTOR, RECOVER, id="recover"),
        pytest.param(profiling_pb2.DESCRIPTOR, PROFILING, id="profiling"),
        pytest.param(pubfault_pb2.DESCRIPTOR, PUBFAULT, id="pubfault"),
        pytest.param(fault_pb2.DESCRIPTOR, FAULT, id="fault"),
        pytest.param(job_pb2.DESCRIPTOR, JOB, id="job"),
        pytest.param(config_pb2.DESCRIPTOR, CONFIG, id="config"),
    ],
)
def test_public_protocols_are_unchanged(file: FileDescriptor, promised: str) -> None:
    assert file.package == promised.split("/")[0].strip().rpartition(".")[0]
    assert described(file) == promised.replace("\\\n", "").split("\n")[1:-1]


def described(file: FileDescriptor) -> list[str]:
    """Services and messages, in order, without the fields of our own (100 and above)."""
    lines = []
    for service in file.services_by_name.values():
        for method in service.methods:
            asked = "stream " * method.client_streaming + method.input_type.full_name
            reply = "stream " * method.server_streaming + method.output_type.full_name
            lines.append(f"{service.full_name}/{method.name} {asked} -> {reply}")
    for message in file.message_types_by_name.values():
        numbered = [
            f"{field.name}={field.number}" for field in message.fields if field.number < 100
        ]
        lines.append(" ".join([message.full_name, *numbered]))
    return lines


def test_our_services_have_their_own_package() -> None:
    assert link_pb2.DESCRIPTOR.package == "taskd.v1"


def test_generated_code_matches_its_sources(tmp_path: Path) -> None:
    """The serialized descriptor inside each *_pb2.py is compiled from the .proto beside it."""
    wire = ROOT / "src/taskd/wire"
    names = sorted(path.name for path in wire.glob("*.proto"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-Itaskd/wire/_pb={wire}"]
        + ["--include_imports", f"--descriptor_set_out={tmp_path}/set"]
        + [f"taskd/wire/_pb/{name}" for name in names],
        check=True,
    )
    compiled = FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    for file in compiled.file:
        module = import_module(file.name.removesuffix(".proto").replace("/", ".") + "_pb2")
        generated = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        assert plainly(generated) == plainly(file), file.name


def plainly(file: FileDescriptorProto) -> str:
    """Without the JSON names, which one compiler writes out and another leaves to be derived."""
    return "\n".join(line for line in str(file).splitlines() if "json_name:" not in line)


def test_each_documented_code_has_a_sentence() -> None:
    net = {0, *range(4000, 4007), 4999, *range(5000, 5004), 5999, 6000, 6001, 6002, 6999}
    recover = {0, *range(400, 409), 499, *range(500, 510), 599}
    further = {200, 201, 409, 410, 411, 413, 429, 510}
    assert {code.value for code in codes.NetCode} == net
    assert {code.value for code in codes.RecoverCode} == recover | further
    for table in (codes.NetCode, codes.RecoverCode, codes.TraceCode):
        for code in table:
            assert code.sentence.endswith("."), code
