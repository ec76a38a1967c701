"""Compiler builtins under common names, and a fast conversion of int."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define hr_prefetch(p) __builtin_prefetch(p, 1)
    #define hr_lowest(v) ((unsigned)__builtin_ctzll(v))
    #elif defined(_MSC_VER)
    #include <intrin.h>
    #define hr_prefetch(p) ((void)0)
    static unsigned hr_lowest(unsigned long long v) { unsigned long i; _BitScanForward64(&i, v); return i; }
    #endif

    /* The digits of an int, read in place where their layout is known: calling the interpreter for each takes as long as the
       rest of a lookup. Anything out of the ordinary goes to the interpreter, which also makes the errors. */
    #if PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX < 0x030C0000
    #define HR_DIGITS(o) (((PyLongObject *)(o))->ob_digit)
    #define HR_SIZE(o) Py_SIZE(o)
    #elif PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX < 0x030F0000
    #define HR_DIGITS(o) (((PyLongObject *)(o))->long_value.ob_digit)
    #define HR_SIZE(o) (((PyLongObject *)(o))->long_value.lv_tag & 3 ? 0 : (Py_ssize_t)(((PyLongObject *)(o))->long_value.lv_tag >> 3))
    #endif
    static CYTHON_INLINE unsigned long long hr_u64(PyObject *o) {
    #ifdef HR_DIGITS
        if (PyLong_CheckExact(o) && HR_SIZE(o) == 3 && HR_DIGITS(o)[2] < 16)
            return HR_DIGITS(o)[0] | (unsigned long long)HR_DIGITS(o)[1] << 30 | (unsigned long long)HR_DIGITS(o)[2] << 60;
    #endif
        return PyLong_AsUnsignedLongLong(o);
    }
    """
    unsigned long long hr_u64(PyObject *) except? 0xFFFFFFFFFFFFFFFF
    void hr_prefetch(void *) noexcept
    unsigned hr_lowest(uint64_t) noexcept
