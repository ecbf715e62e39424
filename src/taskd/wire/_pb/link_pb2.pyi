from taskd.wire._pb import tasknet_pb2 as _tasknet_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("first", "messages", "acks", "received", "hello", "patience_ms")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    first: int
    messages: _containers.RepeatedCompositeFieldContainer[_tasknet_pb2.Message]
    acks: _containers.RepeatedCompositeFieldContainer[_tasknet_pb2.Ack]
    received: int
    hello: Hello
    patience_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[_tasknet_pb2.Message, _Mapping]]] = ..., acks: _Optional[_Iterable[_Union[_tasknet_pb2.Ack, _Mapping]]] = ..., received: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., patience_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "peer_incarnation")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    peer_incarnation: str
    def __init__(self, incarnation: _Optional[str] = ..., peer_incarnation: _Optional[str] = ...) -> None: ...
