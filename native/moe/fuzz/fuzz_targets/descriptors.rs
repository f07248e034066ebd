//! What the ranks of an exchange tell each other of themselves.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_moe::fuzzing::descriptors(bytes));
