//! Arbitrary input of an authenticated tcp peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::tcp(bytes));
