from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Position(_message.Message):
    __slots__ = ("role", "serverRank", "processRank")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SERVERRANK_FIELD_NUMBER: _ClassVar[int]
    PROCESSRANK_FIELD_NUMBER: _ClassVar[int]
    role: str
    serverRank: str
    processRank: str
    def __init__(self, role: _Optional[str] = ..., serverRank: _Optional[str] = ..., processRank: _Optional[str] = ...) -> None: ...

class RegisterReq(_message.Message):
    __slots__ = ("uuid", "pos")
    UUID_FIELD_NUMBER: _ClassVar[int]
    POS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    pos: Position
    def __init__(self, uuid: _Optional[str] = ..., pos: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class PathDiscoveryReq(_message.Message):
    __slots__ = ("uuid", "proxyPos", "path")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PROXYPOS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    proxyPos: Position
    path: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, uuid: _Optional[str] = ..., proxyPos: _Optional[_Union[Position, _Mapping]] = ..., path: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class MessageHeader(_message.Message):
    __slots__ = ("uuid", "mtype", "sync", "src", "dst", "createTime")
    UUID_FIELD_NUMBER: _ClassVar[int]
    MTYPE_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    CREATETIME_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    mtype: str
    sync: bool
    src: Position
    dst: Position
    createTime: int
    def __init__(self, uuid: _Optional[str] = ..., mtype: _Optional[str] = ..., sync: bool = ..., src: _Optional[_Union[Position, _Mapping]] = ..., dst: _Optional[_Union[Position, _Mapping]] = ..., createTime: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("header", "body")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    header: MessageHeader
    body: str
    def __init__(self, header: _Optional[_Union[MessageHeader, _Mapping]] = ..., body: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("uuid", "code", "src")
    UUID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    code: int
    src: Position
    def __init__(self, uuid: _Optional[str] = ..., code: _Optional[int] = ..., src: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...
