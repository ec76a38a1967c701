"""Batches: a record changed by compare-and-set, the lines of its input file as stored jobs, and two files of their results.

Any frontend carries any batch on (`docs/batches.md`).
"""
