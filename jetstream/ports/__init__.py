"""Declares what the rest of the project may ask of NATS, as protocols.

`headrace.jetstream.client.Connection` implements them over NATS.  Tests run the same protocol code over a simulated server that
implements these protocols in virtual time, so code outside `jetstream/` must not need more than the protocols here.

Callbacks are synchronous, run on the event loop, and must not block: they put things into queues or state machines.
"""

from __future__ import annotations

from headrace.jetstream.ports.buckets import Bucket, Change, Entry, KeyState, Watch
from headrace.jetstream.ports.messaging import Delivery, Follow, HealthPort, Messaging, PullLoop, Subscription
from headrace.jetstream.ports.objects import ObjectBucket, ObjectWriter, StoredObject
from headrace.jetstream.ports.records import ConsumerSpec, Message, MessageBatch, Outgoing, PubAck, StoredMessage, StreamState

__all__ = [
    "Bucket",
    "Change",
    "ConsumerSpec",
    "Delivery",
    "Entry",
    "Follow",
    "HealthPort",
    "KeyState",
    "Message",
    "MessageBatch",
    "Messaging",
    "ObjectBucket",
    "ObjectWriter",
    "Outgoing",
    "PubAck",
    "PullLoop",
    "StoredMessage",
    "StoredObject",
    "StreamState",
    "Subscription",
    "Watch",
]
