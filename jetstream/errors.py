"""Defines every exception that can leave `jetstream/`.

HeadraceError                      root of the whole project
└── JetStreamError                 anything NATS
    ├── ConnectError
    │   ├── ServerUnreachable      no server answers at the address
    │   ├── JetStreamDisabled      the server runs without JetStream
    │   ├── ServerTooOld           older than 2.11
    │   └── AccessDenied           credentials refused, or a permission is missing
    ├── SubjectError               a name that cannot be part of a subject
    ├── TopologyError              a stream, consumer or bucket is missing or cannot be made as required
    │   └── TooFewServers          the cluster has fewer servers than a stream should have copies
    ├── PublishError
    │   ├── QueueFull              10077: a subject, the stream or its bytes are at their cap; nothing stored
    │   ├── DiskFull               the server has no room left
    │   ├── PayloadTooLarge        over the server's max_payload
    │   ├── NoLeader               the stream is there without a leader, as during an election; nothing stored
    │   └── PublishUnknown         no answer in time: may be stored or not; retry with the same id
    ├── NoResponder                no subscriber on the subject of a request
    ├── RequestTimeout             a request was not answered in time
    ├── NotConnected               the connection is down and cannot take more
    ├── RevisionConflict           compare-and-set lost
    ├── LeaseLost                  the lease expired or was taken by another holder
    ├── StreamTrimmed              messages that a reader still wanted are no longer in the stream
    └── ObjectError
        ├── ObjectNotFound
        └── ObjectCorrupt          size or digest differ from what was stored

`retriable` says whether the same call may succeed later without the caller changing anything.
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError

NOT_STORING = "does not store messages"  # in the reason that a frontend gives for not being ready


class JetStreamError(HeadraceError):
    """The NATS server, or a call to it, failed."""


class ConnectError(JetStreamError):
    """The connection to the NATS server could not be made."""


class ServerUnreachable(ConnectError):
    """No NATS server answers at the given address."""

    retriable = True


class JetStreamDisabled(ConnectError):
    """The NATS server runs without JetStream."""


class ServerTooOld(ConnectError):
    """The NATS server is older than 2.11."""


class AccessDenied(ConnectError):
    """The NATS server refused the credentials, or a permission is missing."""


class SubjectError(JetStreamError):
    """A name cannot be used as part of a subject."""


class TopologyError(JetStreamError):
    """A stream, consumer or bucket is missing or cannot be made as required."""


class TooFewServers(TopologyError):
    """A cluster has fewer servers than a stream should have copies."""

    retriable = True


class PublishError(JetStreamError):
    """A message was not stored."""


class QueueFull(PublishError):
    """A queue is at its cap; the message was not stored."""

    retriable = True

    def __init__(self, message: str | None = None, *, subject: str = "", scope: str = "stream") -> None:
        """`scope` names the limit that was reached: "subject", "stream" or "bytes"."""
        super().__init__(message)
        self.subject = subject
        self.scope = scope


class DiskFull(PublishError):
    """The NATS server has no storage left."""

    retriable = True


class PayloadTooLarge(PublishError):
    """The message is larger than the server's max_payload."""


class NoLeader(PublishError):
    """No server takes messages for the stream at the moment, as while a cluster elects its leader; nothing was stored."""

    retriable = True


class PublishUnknown(PublishError):
    """The server did not confirm in time; the message may or may not be stored."""

    retriable = True


class NoResponder(JetStreamError):
    """The subject of this request has no subscriber."""

    retriable = True


class RequestTimeout(JetStreamError):
    """A request was not answered in time."""

    retriable = True


class NotConnected(JetStreamError):
    """The connection to the NATS server is down."""

    retriable = True


class RevisionConflict(JetStreamError):
    """The key was changed first by another writer."""


class LeaseLost(JetStreamError):
    """The lease expired or was taken over."""


class StreamTrimmed(JetStreamError):
    """Messages that a reader still wanted are no longer in the stream, or it is another stream under the same name."""

    def __init__(self, message: str | None = None, *, wanted: int = 0, first_seq: int = 0, last_seq: int = 0) -> None:
        """`wanted`: the sequence that the reader had to continue from; the stream has `first_seq` to `last_seq`."""
        super().__init__(message)
        self.wanted = wanted
        self.first_seq = first_seq
        self.last_seq = last_seq


class ObjectError(JetStreamError):
    """An object could not be read or written."""


class ObjectNotFound(ObjectError):
    """The store has no object of that name."""


class ObjectCorrupt(ObjectError):
    """The object's size or digest differs from what was stored."""
