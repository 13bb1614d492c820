from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "peer_id", "version", "pid", "uptime_s", "state", "leaving", "steps", "folder", "checkpoint", "rounds_closed", "rounds_failed", "peers", "faults")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    peer_id: str
    version: str
    pid: int
    uptime_s: float
    state: str
    leaving: str
    steps: int
    folder: str
    checkpoint: str
    rounds_closed: int
    rounds_failed: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    def __init__(self, run: _Optional[str] = ..., peer_id: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., leaving: _Optional[str] = ..., steps: _Optional[int] = ..., folder: _Optional[str] = ..., checkpoint: _Optional[str] = ..., rounds_closed: _Optional[int] = ..., rounds_failed: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("peer_id", "role", "state", "step", "round", "loss", "tokens_per_s", "bytes_sent", "bytes_received", "device", "version", "digest", "seen_s", "address", "lineage")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEEN_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    role: str
    state: str
    step: int
    round: int
    loss: float
    tokens_per_s: float
    bytes_sent: int
    bytes_received: int
    device: str
    version: str
    digest: str
    seen_s: float
    address: str
    lineage: str
    def __init__(self, peer_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., digest: _Optional[str] = ..., seen_s: _Optional[float] = ..., address: _Optional[str] = ..., lineage: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("peer_id", "what", "seconds", "usual_s", "round", "ended", "text")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    USUAL_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    what: str
    seconds: float
    usual_s: float
    round: int
    ended: bool
    text: str
    def __init__(self, peer_id: _Optional[str] = ..., what: _Optional[str] = ..., seconds: _Optional[float] = ..., usual_s: _Optional[float] = ..., round: _Optional[int] = ..., ended: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("already", "within_s")
    ALREADY_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    already: bool
    within_s: float
    def __init__(self, already: _Optional[bool] = ..., within_s: _Optional[float] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("path", "step")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    path: str
    step: int
    def __init__(self, path: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class WatchMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("time", "dropped", "state", "round", "train", "evaluation", "checkpoint", "fault", "done")
    TIME_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    time: float
    dropped: int
    state: State
    round: Round
    train: Train
    evaluation: Evaluation
    checkpoint: Checkpointed
    fault: Fault
    done: Done
    def __init__(self, time: _Optional[float] = ..., dropped: _Optional[int] = ..., state: _Optional[_Union[State, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., train: _Optional[_Union[Train, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpointed, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("state", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("round", "step", "members", "seconds", "waited", "exposed", "bytes_sent", "bytes_received", "failed", "digest", "loss", "tokens_per_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    members: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    waited: float
    exposed: float
    bytes_sent: int
    bytes_received: int
    failed: str
    digest: str
    loss: float
    tokens_per_s: float
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ..., waited: _Optional[float] = ..., exposed: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., failed: _Optional[str] = ..., digest: _Optional[str] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ("step", "loss", "tokens_per_s", "lr")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    tokens_per_s: float
    lr: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., lr: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "loss", "bits", "accuracy")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    bits: float
    accuracy: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., bits: _Optional[float] = ..., accuracy: _Optional[float] = ...) -> None: ...

class Checkpointed(_message.Message):
    __slots__ = ("step", "path", "failed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    failed: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., failed: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("finished", "step", "round", "digest")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    step: int
    round: int
    digest: str
    def __init__(self, finished: _Optional[bool] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...
