//! How values that travel between processes are framed: magic, version, checksum, body.
//!
//! Peers are untrusted: decoding never panics, never allocates more than the input's size allows,
//! and says which rule was broken.

use serde::{de::DeserializeOwned, Serialize};

use crate::{EngineError, Result};

/// Bumped when a body's meaning changes; the previous version stays readable.
pub(crate) const WIRE_VERSION: u16 = 1;
const HEADER: usize = 4 + 2 + 4;

pub(crate) struct Envelope {
    pub magic: [u8; 4],
    pub what: &'static str,
    /// The largest encoding that is accepted, in bytes.
    pub limit: usize,
}

impl Envelope {
    pub fn encode<T: Serialize>(&self, value: &T) -> Vec<u8> {
        // Serialising our own plain values into memory has no way to fail.
        self.seal(&postcard::to_allocvec(value).unwrap_or_default())
    }

    pub fn seal(&self, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + body.len());
        out.extend_from_slice(&self.magic);
        out.extend_from_slice(&WIRE_VERSION.to_le_bytes());
        out.extend_from_slice(&checksum(body).to_le_bytes());
        out.extend_from_slice(body);
        out
    }

    pub fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        let fail = |cause: String| EngineError::Decode { what: self.what, cause };
        if bytes.len() > self.limit {
            return Err(fail(format!("{} bytes, at most {} are allowed", bytes.len(), self.limit)));
        }
        if bytes.len() < HEADER {
            return Err(fail(format!("{} bytes, truncated before the header's end", bytes.len())));
        }
        let (header, body) = bytes.split_at(HEADER);
        if header[..4] != self.magic {
            return Err(fail("it does not begin with the mark of one".into()));
        }
        let version = u16::from_le_bytes([header[4], header[5]]);
        if version != WIRE_VERSION {
            return Err(fail(format!(
                "wire version {version}, this build reads {WIRE_VERSION}; upgrade the older side"
            )));
        }
        let sum = u32::from_le_bytes([header[6], header[7], header[8], header[9]]);
        if sum != checksum(body) {
            return Err(fail(
                "its checksum does not match; it was cut or changed on the way".into(),
            ));
        }
        match postcard::take_from_bytes::<T>(body) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(fail(format!("{} bytes too many at the end", rest.len()))),
            Err(e) => Err(fail(e.to_string())),
        }
    }
}

fn checksum(body: &[u8]) -> u32 {
    crc32fast::hash(body)
}
