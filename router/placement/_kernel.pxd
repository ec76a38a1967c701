"""Types of `kernel.py` for its compiled form, the module `_kernel`."""

cimport cython

cdef double OUT_OF_TURN_S, PRIORITY_S, DEADLINE_MARGIN_S, NEARLY_S


@cython.locals(
    width=Py_ssize_t, wait_s="double[::1]", token_s="double[::1]", step_s="double[::1]", free_blocks="double[::1]",
    taste="double[::1]", factor=double, at=Py_ssize_t, at_column=Py_ssize_t, at_cost=double, at_aged=bint, least=double,
    passed_up=bint, begin=Py_ssize_t, nth=Py_ssize_t, needed=double, work="double[::1]", eligible="const unsigned char[::1]",
    best_cost=double, best_open=bint, choice=double, here=double, mine=Py_ssize_t, column=Py_ssize_t, service=double, cost=double,
    free=bint, preferred=double, age=double, aged=bint, score=double,
)
cpdef tuple choose(
    requests, blocks, double[::1] works, const unsigned char[::1] eligibles, double[::1] columns, double congestion,
    double now_s, double max_wait_s, double ageing
)
