"""Defines every exception that can leave `workers/`.

HeadraceError
└── WorkerError
    ├── EngineError
    │   ├── EngineStartFailed      wrong settings, missing model, no memory: the message says which
    │   │   └── ModelSourceRefused a model, tokenizer or draft model from elsewhere than the operator allows
    │   ├── EngineDead             the engine is gone for good; the worker process must end
    │   ├── EngineOverloaded       the engine takes no more now; retriable elsewhere
    │   ├── RequestInvalid         the engine rejects the request; `param` names the parameter
    │   ├── AnswerUnreadable       a parser failed on the model's output
    │   ├── AdapterFilesError      an adapter's files are not there, not allowed, or not what they should be
    │   └── TransferFailed         KV blocks did not arrive; retriable (more of it in workers/nixl/descriptors.py)
    ├── ModelUnavailable           the bundled model could not be fetched or converted: the message says what to do
    ├── UnsupportedByEngine        the engine lacks this capability
    └── RegistrationRefused        the pool's card contradicts this worker (another block size, say)
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError


class WorkerError(HeadraceError):
    """A worker failed."""


class EngineError(WorkerError):
    """The engine failed."""


class EngineStartFailed(EngineError):
    """The engine could not be started."""


class ModelSourceRefused(EngineStartFailed):
    """A model, or what is loaded with it, comes from where the operator does not allow."""


class EngineDead(EngineError):
    """The engine is gone and cannot be restarted inside this process."""

    retriable = True


class EngineOverloaded(EngineError):
    """The engine takes no more requests right now."""

    retriable = True


class RequestInvalid(EngineError):
    """The engine rejected the request as invalid."""

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AnswerUnreadable(EngineError):
    """A parser for tool calls or reasoning failed on the model's output."""


class AdapterFilesError(EngineError):
    """An adapter's files cannot be had or must not be used."""


class TransferFailed(EngineError):
    """KV blocks did not arrive."""

    retriable = True


class ModelUnavailable(WorkerError):
    """The model files are missing and could not be built."""


class UnsupportedByEngine(WorkerError):
    """The engine lacks a capability that a request needs; `param` names the request's parameter."""

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RegistrationRefused(WorkerError):
    """The pool's model card contradicts this worker."""
