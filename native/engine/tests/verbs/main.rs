//! Faults of the verbs transport: what only happens on devices, or to other processes. All need two
//! RDMA devices that reach each other (`FABRIC_TEST_NICS_A`, `FABRIC_TEST_NICS_B`), and are ignored
//! without; `tests/rdma` runs them in a guest. One at a time: they take links down.

mod faults;
mod limits;
mod peers;
mod rails;
mod registrations;
mod shares;
mod world;
