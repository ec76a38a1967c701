"""The stand-in's top level: the names that applications import from here."""

from .llmapi import LLM, DisaggregatedParams, SamplingParams
from .version import __version__

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams", "__version__"]
