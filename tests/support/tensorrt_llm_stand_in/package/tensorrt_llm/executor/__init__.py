"""What requests are made of, and what comes of them."""

from .request import LoRARequest
from .result import CompletionOutput, GenerationResult, Logprob
from .utils import RequestError

__all__ = ["CompletionOutput", "GenerationResult", "LoRARequest", "Logprob", "RequestError"]
