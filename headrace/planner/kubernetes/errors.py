"""Defines what can go wrong between the planner and Kubernetes.

CommandError
└── KubernetesError
    ├── ApiUnreachable      no connection, or a certificate of another authority: nothing was changed
    ├── OutcomeUnknown      a change was sent and no answer came: it may have been made
    ├── AccessDenied        401, 403: the service account lacks a right
    ├── ObjectMissing       404
    ├── ChangedMeanwhile    409: the object has another version by now
    ├── ApiRefused          any other refusal; `status` has its code
    ├── AnswerUnreadable    the answer is not what the API is described to send
    └── NotScalable         the object is not there, is there twice, is at its bound, or does not hold the worker
"""

from __future__ import annotations

from headrace.base.errors import CommandError


class KubernetesError(CommandError):
    """Kubernetes cannot do what was asked. Nothing was changed, unless the class says otherwise."""


class ApiUnreachable(KubernetesError):
    """The API server cannot be reached."""


class OutcomeUnknown(KubernetesError):
    """A change was sent and its answer did not come. What became of it is seen at the next look, and is not assumed."""


class ApiRefused(KubernetesError):
    """The API server has refused."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AccessDenied(ApiRefused):
    """The service account may not do this."""


class ObjectMissing(ApiRefused):
    """The object does not exist."""


class ChangedMeanwhile(ApiRefused):
    """The object has another version than the one that was read."""


class AnswerUnreadable(KubernetesError):
    """The answer of the API server is not one of this API."""


class NotScalable(KubernetesError):
    """No object, or no single one, can be scaled for this pool and role as was asked."""
