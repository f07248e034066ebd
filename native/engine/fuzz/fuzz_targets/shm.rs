//! Arbitrary input of an authenticated shm peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::shm(bytes));
