"""Defines the errors of API keys.

HeadraceError
└── ApiKeyError
    ├── KeyUnknown      there is no such key
    └── KeyInvalid      what is asked of a key makes no sense
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError


class ApiKeyError(HeadraceError):
    """Base of the errors of API keys."""


class KeyUnknown(ApiKeyError):
    """There is no such key."""


class KeyInvalid(ApiKeyError):
    """The wish for a key, or for its change, makes no sense."""
