//! Faults of the verbs transport that need devices or several processes. All need two RDMA devices
//! that reach each other (`FABRIC_TEST_NICS_A`, `FABRIC_TEST_NICS_B`), and are ignored by default;
//! `tests/rdma` runs them in a guest, one at a time, because they take links down.

mod faults;
mod limits;
mod peers;
mod rails;
mod registrations;
mod shares;
mod world;
