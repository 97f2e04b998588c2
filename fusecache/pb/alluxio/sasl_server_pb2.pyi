from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SaslMessageType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHALLENGE: _ClassVar[SaslMessageType]
    SUCCESS: _ClassVar[SaslMessageType]

class ChannelAuthenticationScheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOSASL: _ClassVar[ChannelAuthenticationScheme]
    SIMPLE: _ClassVar[ChannelAuthenticationScheme]
    CUSTOM: _ClassVar[ChannelAuthenticationScheme]
CHALLENGE: SaslMessageType
SUCCESS: SaslMessageType
NOSASL: ChannelAuthenticationScheme
SIMPLE: ChannelAuthenticationScheme
CUSTOM: ChannelAuthenticationScheme

class SaslMessage(_message.Message):
    __slots__ = ("messageType", "message", "clientId", "authenticationScheme", "channelRef")
    MESSAGETYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATIONSCHEME_FIELD_NUMBER: _ClassVar[int]
    CHANNELREF_FIELD_NUMBER: _ClassVar[int]
    messageType: SaslMessageType
    message: bytes
    clientId: bytes
    authenticationScheme: ChannelAuthenticationScheme
    channelRef: bytes
    def __init__(self, messageType: _Optional[_Union[SaslMessageType, str]] = ..., message: _Optional[bytes] = ..., clientId: _Optional[bytes] = ..., authenticationScheme: _Optional[_Union[ChannelAuthenticationScheme, str]] = ..., channelRef: _Optional[bytes] = ...) -> None: ...
