"""A small Linux guest with soft-RoCE devices, to run a command in.

The guest is a QEMU virtual machine. Its root file system is that of this machine (read-only, with a
layer in memory on top), its kernel is Debian's, and its RDMA devices are `rdma_rxe`: programs that
use libibverbs can be tested where there is neither an adapter nor `rdma_rxe`.

    python -m tests.rdma.guest run -- ibv_devinfo
    python -m tests.rdma.guest run --hosts 2 --rails 2 --timeout 120 -- ./my-test
    python -m tests.rdma.guest shell

Only the standard library is used. `docs/rdma-guest.md` says what the guest has and lacks.
"""
