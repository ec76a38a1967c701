"""Errors of single requests."""


class RequestError(RuntimeError):
    """A request has failed, and the engine goes on."""
