//! The envelope of values that travel between processes: magic, version, checksum, body.
//!
//! Two neighbouring versions are readable at a time, so that processes can be upgraded one after
//! another. A writer rarely knows its readers, so the written version has a number of its own. It
//! follows the newest readable version one release later.
//!
//! Peers are untrusted: decoding never panics, never allocates more than the input's size allows,
//! and says which rule was broken.

use std::fmt;

use serde::{de::DeserializeOwned, Serialize};

use crate::{EngineError, Result};

/// A range of versions of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Versions {
    pub oldest: u16,
    pub newest: u16,
}

/// The versions that this build reads and offers in handshakes. Any change of a body bumps the
/// newest; the oldest follows two releases later.
pub(crate) const WIRE: Versions = Versions { oldest: 1, newest: 1 };

/// The version that this build writes. It follows the newest of [`WIRE`] one release later, when
/// all possible readers can read it.
const WRITES: u16 = 1;

const _: () = assert!(WIRE.oldest <= WRITES && WRITES <= WIRE.newest);

impl Versions {
    /// Of a format that never changes.
    pub const fn only(version: u16) -> Self {
        Self { oldest: version, newest: version }
    }

    pub fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// The newest that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let version = self.newest.min(other.newest);
        (self.contains(version) && other.contains(version)).then_some(version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "{}", self.newest),
            false => write!(f, "{} to {}", self.oldest, self.newest),
        }
    }
}

const HEADER: usize = 4 + 2 + 4;

pub(crate) struct Envelope {
    pub magic: [u8; 4],
    pub what: &'static str,
    /// The largest encoding that is accepted, in bytes.
    pub limit: usize,
    /// Versions that are opened.
    pub reads: Versions,
    /// The version that is sealed: one of those that are read.
    pub writes: u16,
}

impl Envelope {
    /// Of the format that this build speaks.
    pub const fn new(magic: [u8; 4], what: &'static str, limit: usize) -> Self {
        Self { magic, what, limit, reads: WIRE, writes: WRITES }
    }

    pub fn encode<T: Serialize>(&self, value: &T) -> Vec<u8> {
        // Serialising our own plain values into memory has no way to fail.
        self.seal(&postcard::to_allocvec(value).unwrap_or_default())
    }

    /// Checks before it is sent that a peer accepts the encoding.
    pub fn check_size<T: Serialize>(&self, value: &T) -> std::result::Result<(), String> {
        let size =
            HEADER + postcard::experimental::serialized_size(value).unwrap_or(usize::MAX / 2);
        match size <= self.limit {
            true => Ok(()),
            false => {
                Err(format!("{} takes {size} bytes, at most {} are allowed", self.what, self.limit))
            }
        }
    }

    pub fn seal(&self, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + body.len());
        out.extend_from_slice(&self.magic);
        out.extend_from_slice(&self.writes.to_le_bytes());
        out.extend_from_slice(&checksum(body).to_le_bytes());
        out.extend_from_slice(body);
        out
    }

    pub fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        let fail = |cause: String| EngineError::Decode { what: self.what, cause };
        match postcard::take_from_bytes::<T>(self.open(bytes)?) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(fail(format!("{} bytes too many at the end", rest.len()))),
            Err(e) => Err(fail(e.to_string())),
        }
    }

    /// The body, unharmed and of a version that is read here.
    pub(crate) fn open<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8]> {
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
        if !self.reads.contains(version) {
            return Err(fail(format!(
                "wire version {version}, this build reads {}; upgrade the older side",
                self.reads
            )));
        }
        let sum = u32::from_le_bytes([header[6], header[7], header[8], header[9]]);
        if sum != checksum(body) {
            return Err(fail(
                "its checksum does not match; it was cut or changed on the way".into(),
            ));
        }
        Ok(body)
    }
}

fn checksum(body: &[u8]) -> u32 {
    crc32fast::hash(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(oldest: u16, newest: u16, writes: u16) -> Envelope {
        let reads = Versions { oldest, newest };
        assert!(reads.contains(writes));
        Envelope { magic: *b"FRxx", what: "a value", limit: 64, reads, writes }
    }

    /// Releases in a row while version 2 comes and version 1 goes, then 3 and 2.
    fn releases() -> Vec<Envelope> {
        [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), (2, 3, 2), (2, 3, 3), (3, 3, 3)]
            .map(|(oldest, newest, writes)| build(oldest, newest, writes))
            .into()
    }

    #[test]
    fn releases_next_to_each_other_read_each_others_values() {
        for pair in releases().windows(2) {
            let (older, newer) = (&pair[0], &pair[1]);
            assert_eq!(newer.decode::<u32>(&older.encode(&7u32)), Ok(7));
            assert_eq!(older.decode::<u32>(&newer.encode(&8u32)), Ok(8));
            assert!(older.reads.common(newer.reads).is_some());
        }
    }

    #[test]
    fn a_value_is_of_the_version_that_is_written_not_of_the_oldest_or_newest_read() {
        for release in releases() {
            let sealed = release.encode(&7u32);
            assert_eq!(sealed[4..6], release.writes.to_le_bytes());
        }
    }

    #[test]
    fn values_of_builds_further_apart_are_refused_with_both_versions() {
        let text = |e: EngineError| e.to_string();
        let newer = build(1, 2, 1).decode::<u32>(&build(3, 3, 3).encode(&7u32)).map_err(text);
        assert!(newer.unwrap_err().contains("wire version 3, this build reads 1 to 2; upgrade"));
        let older = build(3, 4, 3).decode::<u32>(&build(2, 2, 2).encode(&7u32)).map_err(text);
        assert!(older.unwrap_err().contains("wire version 2, this build reads 3 to 4; upgrade"));
    }

    #[test]
    fn builds_meet_at_the_newest_version_that_both_speak() {
        let common = |a: (u16, u16), b: (u16, u16)| {
            let versions = |(oldest, newest)| Versions { oldest, newest };
            versions(a).common(versions(b))
        };
        assert_eq!(common((1, 2), (2, 3)), Some(2));
        assert_eq!(common((1, 3), (1, 2)), Some(2));
        assert_eq!(common((1, 1), (1, 1)), Some(1));
        assert_eq!(common((1, 2), (3, 4)), None);
        assert_eq!(common((3, 4), (1, 2)), None);
        // An empty range has nothing in common with any.
        assert_eq!(common((2, 1), (1, 2)), None);
        assert_eq!(common((1, 2), (2, 1)), None);
    }
}
