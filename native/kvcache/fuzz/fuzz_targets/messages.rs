//! Messages between the two ends of a KV cache transfer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_kvcache::fuzzing::messages(bytes));
