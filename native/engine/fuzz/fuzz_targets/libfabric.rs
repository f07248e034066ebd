//! Strangers and peers of an endpoint of libfabric, and whatever they say before it becomes a write.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::libfabric(bytes));
