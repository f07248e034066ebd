"""`python -m benchmarks.rdma`: writes between soft-RoCE devices, beside perftest.

Absolute speed means nothing in a guest whose CPUs are emulated; the ratio of two programs in one
boot does. Contenders take turns, so that what else the machine does meets all of them.
"""
