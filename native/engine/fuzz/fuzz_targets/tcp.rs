//! A tcp peer that has proven itself and then says anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::tcp(bytes));
