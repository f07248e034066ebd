//! Fuzzes everything that a proxy reads from its device and from its peers' proxies.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_proxy::fuzzing::commands(bytes));
