//! A handshake with a peer that doesn't know the token.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_engine::fuzzing::handshake(bytes));
