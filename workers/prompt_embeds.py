"""Reads tensors of a request (`headrace.broker.torch_tensors`) and refuses invalid ones with the parameter's name."""

from __future__ import annotations

from collections.abc import Callable

from headrace.broker import torch_tensors
from headrace.broker.torch_tensors import StoredTensor, TensorUnreadable
from headrace.workers.errors import RequestInvalid

__all__ = ["StoredTensor", "read_matrix", "read_tensor"]


def read_tensor(file: bytes, *, param: str) -> StoredTensor:
    """Read a dense float tensor as `torch.save` writes it. Raises RequestInvalid naming `param` for anything else."""
    return _read(torch_tensors.read_tensor, file, param)


def read_matrix(file: bytes, *, param: str) -> StoredTensor:
    """Read a tensor of two dimensions, or of more dimensions with leading ones of size 1. Raises RequestInvalid."""
    return _read(torch_tensors.read_matrix, file, param)


def _read(read: Callable[[bytes], StoredTensor], file: bytes, param: str) -> StoredTensor:
    try:
        return read(file)
    except TensorUnreadable as error:
        raise RequestInvalid(f"{param}: {error}", param=param) from None
