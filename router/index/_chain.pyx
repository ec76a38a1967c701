# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Chains of block values that come from Python, converted to u64."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from headrace.router.index._bits cimport hr_prefetch, hr_u64

cdef extern from "Python.h":
    object PySequence_Fast(object, const char *)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    PyObject **PySequence_Fast_ITEMS(object)


cdef class Chain:
    """Reads u64 from any sequence of int, without making objects if that is an array('Q') or a memoryview like it."""

    def __cinit__(self, blocks):
        if not isinstance(blocks, (list, tuple)) and PyObject_CheckBuffer(blocks):
            self._borrow(blocks)
            if self.buffered:
                return
        self.owner = PySequence_Fast(blocks, b"blocks must be a sequence of int")
        self.items = PySequence_Fast_ITEMS(self.owner)
        self.n = PySequence_Fast_GET_SIZE(self.owner)

    def __dealloc__(self):
        if self.buffered:
            PyBuffer_Release(&self.view)

    cdef int _borrow(self, blocks) except -1:
        """Borrow the memory of `blocks`, if that is u64 one after the other."""
        try:
            PyObject_GetBuffer(blocks, &self.view, PyBUF_ND | PyBUF_FORMAT)
        except BufferError:  # every other item, say: it is read like any sequence
            return 0
        if self.view.ndim == 1 and self.view.itemsize == 8 and self.view.format != NULL and self.view.format[0] in (c"Q", c"L"):
            self.buffered = True
            self.n = self.view.len // 8
        else:
            PyBuffer_Release(&self.view)
        return 0

    cdef int read(self, Py_ssize_t start, int count, uint64_t *out) except -1:
        cdef int i
        if self.buffered:
            memcpy(out, <uint64_t *>self.view.buf + start, count * sizeof(uint64_t))
            return 0
        for i in range(count):
            hr_prefetch(self.items[start + i])
        for i in range(count):
            out[i] = hr_u64(self.items[start + i])
        return 0

    cdef int pick(self, uint32_t *at, int count, uint64_t *out) except -1:
        """Read the values at some places."""
        cdef int i
        if self.buffered:
            for i in range(count):
                out[i] = (<uint64_t *>self.view.buf)[at[i]]
            return 0
        for i in range(count):
            hr_prefetch(self.items[at[i]])
        for i in range(count):
            out[i] = hr_u64(self.items[at[i]])
        return 0
