"""The return codes that peers and users see, with one sentence each."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class _Described(IntEnum):
    """An int with a sentence that explains it."""

    sentence: str

    def __new__(cls, value: int, sentence: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member


class NetCode(_Described):
    """The code of an Ack on the bus."""

    OK = 0, "The destination has accepted the message."
    NilMessage = 4000, "The message is empty."
    NilHeader = 4001, "The message has no header."
    NilPosition = 4002, "The message lacks its source or its destination."
    DstRoleIllegal = 4003, "Unknown role of the destination (expected Mgr, Proxy, Agent or Worker)."
    DstSrvRankIllegal = (
        4004,
        "Invalid server rank (expected a number, a list or All).",
    )
    DstProcessRankIllegal = (
        4005,
        "Invalid process rank (expected a number, a list or All).",
    )
    DstTypeIllegal = 4006, "This kind of destination cannot be addressed."
    ClientErr = 4999, "The sender made an error that has no code of its own."
    RecvBufNil = 5000, "The destination has no receive buffer."
    RecvBufBusy = 5001, "The destination's receive buffer is full: send less, or retry later."
    NoRoute = 5002, "No route to the destination: it has not joined, or it has left."
    ExceedMaxRegistryNum = 5003, "The server's table of peers is full."
    ServerErr = 5999, "Disconnected from upstream: the parent server cannot be reached now."
    NetworkSendLost = 6000, "The message could not be sent to the next hop."
    NetworkAckLost = 6001, "No acknowledgement came in time; the message may have arrived."
    NetStreamNotInited = 6002, "The next hop has registered but has not opened its stream."
    NetErr = 6999, "The network failed with an error that has no code of its own."


_NET_CODES = {int(code): code for code in NetCode}


def net_code(number: int) -> NetCode:
    """Read a code from the wire. An undefined number counts as NetErr."""
    return _NET_CODES.get(number, NetCode.NetErr)


class RecoverCode(_Described):
    """The codes of clusterd's answers and of its clients' reports."""

    OK = 0, "The call succeeded."
    SuccessCode = 200, "The call succeeded."
    ExitIsolateRanks = (
        201,
        "These ranks leave the job; the others continue without them.",
    )
    UnRegistry = 400, "The job is not registered: call Init and Register first."
    OrderMix = 401, "The job's round does not expect this request now."
    JobNotExist = 402, "The cluster does not know the job."
    ProcessRecoverEnableOff = 403, "Recovery is switched off for this job."
    ProcessNotReady = 404, "The training processes have not been started yet."
    RecoverableRetryError = 405, "The retry failed; replacing the processes can still help."
    UnRecoverableRetryError = 406, "The retry failed, and replacing the processes cannot help."
    DumpError = 407, "The emergency checkpoint could not be saved."
    UnInit = 408, "The job is not initialised: call Init first."
    InvalidReqParam = 409, "A parameter of the request is not valid."
    InvalidReqRate = 410, "Too many requests of this kind."
    OMIsRunning = 411, "Another operation is running on this job: retry when it has ended."
    OMParamInvalid = 413, "A parameter of the operation is not valid."
    RateLimited = 429, "Too many requests at once."
    ClientError = 499, "The client failed for another reason."
    OutOfMaxServeJobs = 500, "The server has reached its maximum number of jobs."
    OperateConfigMapError = 501, "A ConfigMap could not be read or written."
    OperatePodGroupError = 502, "The job's PodGroup could not be read or written."
    ScheduleTimeout = 503, "The replacement was not scheduled in time."
    SignalQueueBusy = 504, "The job reads its signals too slowly."
    EventQueueBusy = 505, "The job sends events faster than they are handled."
    ControllerEventCancel = 506, "The round ended before this could be handled."
    WaitReportTimeout = 507, "The client did not report in time."
    WaitPlatStrategyTimeout = 508, "The platform did not name a strategy in time."
    WriteConfirmFaultOrWaitPlatResultFault = 509, "The platform did not confirm the faults."
    HCCLRoutingConvergenceFail = 510, "The network did not find new routes."
    ServerInnerError = 599, "Internal server error; see the server's log."


NOT_STORED = "the decision could not be stored, and was not made: "
"""Begins the info of a `ServerInnerError` after which the same call may succeed later."""


class TraceCode(_Described):
    """The codes of TrainingDataTrace's answers."""

    OK = 200, "The call succeeded."
    BadParameter = 300, "A parameter of the request is not valid."
    NotFound = 404, "Unknown job, or no switch has been set for it."
    ServerFault = 500, "The switch could not be stored or delivered."
