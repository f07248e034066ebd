//! Copies between a window and a region that an authenticated peer requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::staging(bytes));
