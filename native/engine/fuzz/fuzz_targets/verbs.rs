//! Strangers and peers of a NIC, and whatever they say before it becomes a write.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::verbs(bytes));
