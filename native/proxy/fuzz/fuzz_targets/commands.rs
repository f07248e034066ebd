//! What a proxy reads of its device's and of its peers'.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_proxy::fuzzing::commands(bytes));
