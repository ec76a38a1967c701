"""Tensors that came with a request (`headrace.broker.torch_tensors`), with a refusal that names the parameter."""

from __future__ import annotations

from collections.abc import Callable

from headrace.broker import torch_tensors
from headrace.broker.torch_tensors import StoredTensor, TensorUnreadable
from headrace.workers.errors import RequestInvalid

__all__ = ["StoredTensor", "read_matrix", "read_tensor"]


def read_tensor(file: bytes, *, param: str) -> StoredTensor:
    """Raises RequestInvalid, naming `param`, for anything but one dense float tensor as `torch.save` writes it."""
    return _read(torch_tensors.read_tensor, file, param)


def read_matrix(file: bytes, *, param: str) -> StoredTensor:
    """A tensor of two dimensions; one of more whose first are 1 counts as such. Raises RequestInvalid."""
    return _read(torch_tensors.read_matrix, file, param)


def _read(read: Callable[[bytes], StoredTensor], file: bytes, param: str) -> StoredTensor:
    try:
        return read(file)
    except TensorUnreadable as error:
        raise RequestInvalid(f"{param}: {error}", param=param) from None
