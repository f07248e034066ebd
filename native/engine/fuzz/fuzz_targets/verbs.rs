//! Input of unauthenticated and authenticated peers of a verbs NIC.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::verbs(bytes));
