from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t


cdef class Chain:
    cdef Py_ssize_t n
    cdef object owner
    cdef Py_buffer view
    cdef bint buffered
    cdef PyObject **items

    cdef int read(self, Py_ssize_t start, int count, uint64_t *out) except -1
    cdef int pick(self, uint32_t *at, int count, uint64_t *out) except -1
    cdef int _borrow(self, blocks) except -1
