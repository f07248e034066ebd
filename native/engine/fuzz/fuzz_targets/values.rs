//! Values that travel between processes: addresses, descriptors, counter references.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::values(bytes));
