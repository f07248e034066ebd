//! Regions and grants that peers name by key.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::regions(bytes));
