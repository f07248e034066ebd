//! What the ranks of an exchange write into each other's memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_moe::fuzzing::blocks(bytes));
