"""The return codes that peers and users see, with one sentence each."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class _Told(IntEnum):
    """An int that knows its sentence."""

    sentence: str

    def __new__(cls, value: int, sentence: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member


class NetCode(_Told):
    """What an Ack on the bus carries."""

    OK = 0, "The message was taken over by its destination."
    NilMessage = 4000, "The message is empty."
    NilHeader = 4001, "The message has no header."
    NilPosition = 4002, "The message lacks its source or its destination."
    DstRoleIllegal = 4003, "The destination's role is none of Mgr, Proxy, Agent and Worker."
    DstSrvRankIllegal = 4004, "The destination's server rank is neither a number, a list nor All."
    DstProcessRankIllegal = 4005, "The destination's process rank is no number, list or All."
    DstTypeIllegal = 4006, "The destination is of a kind that cannot be addressed."
    ClientErr = 4999, "The sender made a mistake that no other code names."
    RecvBufNil = 5000, "The destination has no receive buffer."
    RecvBufBusy = 5001, "The destination's receive buffer is full: send less, or again later."
    NoRoute = 5002, "No path to the destination is known: it has not joined, or has left."
    ExceedMaxRegistryNum = 5003, "The server's table of peers is full."
    ServerErr = 5999, "The way up is closed: the server above is not reached at present."
    NetworkSendLost = 6000, "The message could not be handed to the next hop."
    NetworkAckLost = 6001, "No acknowledgement came in time; the message may have arrived."
    NetStreamNotInited = 6002, "The next hop has registered but has not opened its stream."
    NetErr = 6999, "The network failed in a way that no other code names."


_NET_CODES = {int(code): code for code in NetCode}


def net_code(number: int) -> NetCode:
    """A number from the wire. One that nobody has defined is as good as NetErr."""
    return _NET_CODES.get(number, NetCode.NetErr)


class RecoverCode(_Told):
    """What clusterd answers, and what its clients report."""

    OK = 0, "The call succeeded."
    SuccessCode = 200, "The call succeeded."
    ExitIsolateRanks = 201, "These ranks leave the job, so that the rest can go on without them."
    UnRegistry = 400, "The job is not registered: call Init and Register first."
    OrderMix = 401, "The job's round is not waiting for this request now."
    JobNotExist = 402, "No such job is known to the cluster."
    ProcessRecoverEnableOff = 403, "Recovery is switched off for this job."
    ProcessNotReady = 404, "The training processes have not been started yet."
    RecoverableRetryError = 405, "The retry failed; replacing the processes can still help."
    UnRecoverableRetryError = 406, "The retry failed, and replacing the processes cannot help."
    DumpError = 407, "The last checkpoint could not be saved."
    UnInit = 408, "The job is not initialised: call Init first."
    InvalidReqParam = 409, "A parameter of the request is not valid."
    InvalidReqRate = 410, "Requests of this kind come too fast."
    OMIsRunning = 411, "Another operation is running on this job: wait until it has ended."
    OMParamInvalid = 413, "A parameter of the operation is not valid."
    RateLimited = 429, "Too many requests at once."
    ClientError = 499, "The client failed for another reason."
    OutOfMaxServeJobs = 500, "The server serves as many jobs as it can."
    OperateConfigMapError = 501, "A ConfigMap could not be read or written."
    OperatePodGroupError = 502, "The job's PodGroup could not be read or written."
    ScheduleTimeout = 503, "The replacement was not scheduled in time."
    SignalQueueBusy = 504, "The job takes its signals too slowly."
    EventQueueBusy = 505, "The job's events come faster than they are handled."
    ControllerEventCancel = 506, "The round was ended before this could be handled."
    WaitReportTimeout = 507, "The client did not report in time."
    WaitPlatStrategyTimeout = 508, "The platform did not name a strategy in time."
    WriteConfirmFaultOrWaitPlatResultFault = 509, "The platform's fault exchange went wrong."
    HCCLRoutingConvergenceFail = 510, "The network's routes did not settle."
    ServerInnerError = 599, "The server failed; its log says why."


class TraceCode(_Told):
    """What TrainingDataTrace answers."""

    OK = 200, "The call succeeded."
    BadParameter = 300, "A parameter of the request is not valid."
    NotFound = 404, "No such job, or no switch has been set for it."
    ServerFault = 500, "The switch could not be stored or delivered."
