from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Answer(_message.Message):
    __slots__ = ("code", "info")
    CODE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    code: int
    info: str
    def __init__(self, code: _Optional[int] = ..., info: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_rank", "name", "ranks", "uid")
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    node_rank: int
    name: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    uid: str
    def __init__(self, node_rank: _Optional[int] = ..., name: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., uid: _Optional[str] = ...) -> None: ...

class JobDeclaration(_message.Message):
    __slots__ = ("job", "name", "namespace", "framework", "strategies", "nodes", "no_backup_nic")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FRAMEWORK_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NO_BACKUP_NIC_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    namespace: str
    framework: str
    strategies: _containers.RepeatedScalarFieldContainer[str]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    no_backup_nic: bool
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., framework: _Optional[str] = ..., strategies: _Optional[_Iterable[str]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., no_backup_nic: bool = ...) -> None: ...

class JobEnd(_message.Message):
    __slots__ = ("job", "exit_code", "because")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    job: str
    exit_code: int
    because: str
    def __init__(self, job: _Optional[str] = ..., exit_code: _Optional[int] = ..., because: _Optional[str] = ...) -> None: ...

class JobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job", "changes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    job: str
    changes: bool
    def __init__(self, job: _Optional[str] = ..., changes: bool = ...) -> None: ...

class JobLine(_message.Message):
    __slots__ = ("job", "name", "namespace", "state", "because", "incident", "subscribed", "world", "step", "steps_per_s", "changed_unix_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CHANGED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    namespace: str
    state: str
    because: str
    incident: int
    subscribed: bool
    world: int
    step: int
    steps_per_s: float
    changed_unix_ms: int
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., state: _Optional[str] = ..., because: _Optional[str] = ..., incident: _Optional[int] = ..., subscribed: bool = ..., world: _Optional[int] = ..., step: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., changed_unix_ms: _Optional[int] = ...) -> None: ...

class JobList(_message.Message):
    __slots__ = ("jobs", "scope")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobLine]
    scope: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobLine, _Mapping]]] = ..., scope: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "node", "host", "pid", "incarnation", "phase", "step", "idle_s", "note")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: int
    host: str
    pid: int
    incarnation: int
    phase: str
    step: int
    idle_s: float
    note: str
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[int] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., idle_s: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class JobFault(_message.Message):
    __slots__ = ("rank", "fault_type", "evidence")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FAULT_TYPE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    fault_type: str
    evidence: str
    def __init__(self, rank: _Optional[int] = ..., fault_type: _Optional[str] = ..., evidence: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("line", "strategies", "strategy", "deadline_unix_ms", "faults", "ranks", "rounds", "decision", "manager", "profiling", "stragglers", "places", "operation", "goodput", "started_unix_ms", "nodes", "history", "total_steps", "same_ranks", "same_places", "shards")
    LINE_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    PROFILING_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAME_RANKS_FIELD_NUMBER: _ClassVar[int]
    SAME_PLACES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    line: JobLine
    strategies: _containers.RepeatedScalarFieldContainer[str]
    strategy: str
    deadline_unix_ms: int
    faults: _containers.RepeatedCompositeFieldContainer[JobFault]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    decision: int
    manager: str
    profiling: str
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    operation: str
    goodput: float
    started_unix_ms: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    history: int
    total_steps: int
    same_ranks: bool
    same_places: bool
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    def __init__(self, line: _Optional[_Union[JobLine, _Mapping]] = ..., strategies: _Optional[_Iterable[str]] = ..., strategy: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[JobFault, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., decision: _Optional[int] = ..., manager: _Optional[str] = ..., profiling: _Optional[str] = ..., stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., operation: _Optional[str] = ..., goodput: _Optional[float] = ..., started_unix_ms: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., history: _Optional[int] = ..., total_steps: _Optional[int] = ..., same_ranks: bool = ..., same_places: bool = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "replicas", "copies")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    shard: str
    replicas: _containers.RepeatedScalarFieldContainer[int]
    copies: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard: _Optional[str] = ..., replicas: _Optional[_Iterable[int]] = ..., copies: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "host", "present", "spare", "problem", "leader", "ranks", "only_here", "shards", "not_copied")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ONLY_HERE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NOT_COPIED_FIELD_NUMBER: _ClassVar[int]
    node: int
    host: str
    present: bool
    spare: bool
    problem: str
    leader: bool
    ranks: int
    only_here: _containers.RepeatedScalarFieldContainer[str]
    shards: int
    not_copied: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[int] = ..., host: _Optional[str] = ..., present: bool = ..., spare: bool = ..., problem: _Optional[str] = ..., leader: bool = ..., ranks: _Optional[int] = ..., only_here: _Optional[_Iterable[str]] = ..., shards: _Optional[int] = ..., not_copied: _Optional[_Iterable[str]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("rank", "node", "device")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: str
    device: str
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("incident", "began_unix_ms", "took_ms", "strategy", "outcome", "faults")
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    incident: int
    began_unix_ms: int
    took_ms: int
    strategy: str
    outcome: str
    faults: _containers.RepeatedCompositeFieldContainer[JobFault]
    def __init__(self, incident: _Optional[int] = ..., began_unix_ms: _Optional[int] = ..., took_ms: _Optional[int] = ..., strategy: _Optional[str] = ..., outcome: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[JobFault, _Mapping]]] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("job", "incident", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    incident: int
    after: int
    def __init__(self, job: _Optional[str] = ..., incident: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class HistoryLine(_message.Message):
    __slots__ = ("number", "at_unix_ms", "incident", "event", "before", "after", "because", "commands")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_unix_ms: int
    incident: int
    event: str
    before: str
    after: str
    because: str
    commands: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., at_unix_ms: _Optional[int] = ..., incident: _Optional[int] = ..., event: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., because: _Optional[str] = ..., commands: _Optional[_Iterable[str]] = ...) -> None: ...

class FaultReport(_message.Message):
    __slots__ = ("job", "faults", "reporter", "drain", "checkpoint")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    job: str
    faults: _containers.RepeatedCompositeFieldContainer[JobFault]
    reporter: str
    drain: bool
    checkpoint: bool
    def __init__(self, job: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[JobFault, _Mapping]]] = ..., reporter: _Optional[str] = ..., drain: bool = ..., checkpoint: bool = ...) -> None: ...

class JobProgress(_message.Message):
    __slots__ = ("job", "step", "steps_per_s", "world", "summary", "ranks", "profiling", "stragglers", "operation", "goodput", "started_unix_ms", "nodes", "total_steps", "rank_version", "shards")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PROFILING_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    RANK_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    steps_per_s: float
    world: int
    summary: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    profiling: str
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    operation: str
    goodput: float
    started_unix_ms: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    total_steps: int
    rank_version: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., world: _Optional[int] = ..., summary: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., profiling: _Optional[str] = ..., stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ..., operation: _Optional[str] = ..., goodput: _Optional[float] = ..., started_unix_ms: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., total_steps: _Optional[int] = ..., rank_version: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ...) -> None: ...

class Straggler(_message.Message):
    __slots__ = ("rank", "cause", "late_ms", "slower", "since_unix_ms", "evidence")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    LATE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOWER_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    cause: str
    late_ms: float
    slower: float
    since_unix_ms: int
    evidence: str
    def __init__(self, rank: _Optional[int] = ..., cause: _Optional[str] = ..., late_ms: _Optional[float] = ..., slower: _Optional[float] = ..., since_unix_ms: _Optional[int] = ..., evidence: _Optional[str] = ...) -> None: ...

class SubHealth(_message.Message):
    __slots__ = ("job", "stragglers")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    def __init__(self, job: _Optional[str] = ..., stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ...) -> None: ...

class IncidentReport(_message.Message):
    __slots__ = ("job", "incident", "phases", "strategy", "outcome", "because", "faults", "ranks", "links")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    incident: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    strategy: str
    outcome: str
    because: str
    faults: _containers.RepeatedCompositeFieldContainer[IncidentFault]
    ranks: _containers.RepeatedCompositeFieldContainer[RankActivity]
    links: _containers.RepeatedCompositeFieldContainer[LinkChange]
    def __init__(self, job: _Optional[str] = ..., incident: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., strategy: _Optional[str] = ..., outcome: _Optional[str] = ..., because: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[IncidentFault, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankActivity, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkChange, _Mapping]]] = ...) -> None: ...

class LinkChange(_message.Message):
    __slots__ = ("node", "host", "link", "counter", "change", "total")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    node: int
    host: str
    link: str
    counter: str
    change: int
    total: int
    def __init__(self, node: _Optional[int] = ..., host: _Optional[str] = ..., link: _Optional[str] = ..., counter: _Optional[str] = ..., change: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "at_unix_ms", "took_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    at_unix_ms: int
    took_ms: float
    def __init__(self, name: _Optional[str] = ..., at_unix_ms: _Optional[int] = ..., took_ms: _Optional[float] = ...) -> None: ...

class IncidentFault(_message.Message):
    __slots__ = ("rank", "node", "host", "cause", "evidence")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: int
    host: str
    cause: str
    evidence: str
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[int] = ..., host: _Optional[str] = ..., cause: _Optional[str] = ..., evidence: _Optional[str] = ...) -> None: ...

class RankActivity(_message.Message):
    __slots__ = ("rank", "step", "collective", "waiting", "idle_s", "stack")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    collective: int
    waiting: bool
    idle_s: float
    stack: str
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., collective: _Optional[int] = ..., waiting: bool = ..., idle_s: _Optional[float] = ..., stack: _Optional[str] = ...) -> None: ...

class OperatorAction(_message.Message):
    __slots__ = ("job", "who", "action")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    job: str
    who: str
    action: str
    def __init__(self, job: _Optional[str] = ..., who: _Optional[str] = ..., action: _Optional[str] = ...) -> None: ...
