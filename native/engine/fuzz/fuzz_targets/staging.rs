//! Copies that a proven peer asks for between its window and a region.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::staging(bytes));
