//! Messages between decoders and prefillers: msgpack behind a mark and a version. A peer of another
//! version gets an error that names both versions.
//!
//! Field names are on the wire, so a newer peer may add fields that have defaults. Peers are
//! untrusted: decoding is bounded by the message, and users of a value check it.

use std::ops::RangeInclusive;

use fabric_engine::{
    api::{CounterRef, EngineAddress, RegionDescriptor},
    EngineError,
};
use serde::{de::DeserializeOwned, Deserialize, Serialize};

use crate::layout::CacheLayout;

const MARK: [u8; 3] = *b"FKV";
/// The written version. It is bumped when a message's meaning changes, one release after the new
/// version becomes readable.
pub const VERSION: u8 = 2;
/// The readable versions: the written one and at most one neighbour.
const READS: RangeInclusive<u8> = VERSION..=VERSION;
/// Most requests, and most leases, of one beat, which fits the smallest `max_message`.
pub(crate) const BEAT_NUMBERS: usize = 128;
/// Most bytes of states of one status, which fits the smallest `max_message`.
const STATUS_BYTES: usize = 3072;
/// Longest reason, bytes; longer ones are cut.
const REASON_BYTES: usize = 512;

/// A reason of at most the allowed length.
pub(crate) fn reason(why: &str) -> String {
    let end = (0..=why.len().min(REASON_BYTES)).rev().find(|end| why.is_char_boundary(*end));
    why[..end.unwrap_or(0)].to_owned()
}

/// A prefiller's offer; its holder can request pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    pub name: String,
    /// Of all its ranks, by number.
    pub layouts: Vec<CacheLayout>,
    /// Processes of the instance. Together they have every rank once.
    pub ends: Vec<OfferEnd>,
    /// Bytes that come with the last page: logits, hidden states.
    pub tail_nbytes: u64,
    /// The longest message that it takes, bytes.
    pub max_message: u64,
}

/// One process of a prefiller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferEnd {
    /// The engine that takes messages.
    pub address: EngineAddress,
    /// The ranks that live there, and the engine that each writes from.
    pub ranks: Vec<(u32, EngineAddress)>,
}

/// The first message of a decoder's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The number of the session, which later messages name.
    pub session: u64,
    pub name: String,
    /// The address for answers.
    pub address: EngineAddress,
    /// Of all the decoder's ranks, by number.
    pub layouts: Vec<CacheLayout>,
    /// The memory that may be written, of the ranks in this process.
    pub grants: Vec<Grant>,
    pub tail_nbytes: u64,
    /// Interval of beats, milliseconds.
    pub beat_ms: u32,
}

/// The memory of one rank of the decoder, for one prefiller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    pub rank: u32,
    /// The layout's buffers, in order.
    pub buffers: Vec<RegionDescriptor>,
    /// Slots for tails.
    pub tail: Option<RegionDescriptor>,
}

/// A request for the pages of one prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub seq: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The number of leading tokens that the decoder has.
    pub have: u64,
    /// Selects among replicas.
    pub salt: u64,
    /// The decoder's pages, for each group.
    pub tables: Vec<PageTable>,
    /// The counter of arrivals of each rank of [`Hello::grants`].
    pub counters: Vec<CounterRef>,
    pub tail_slot: u32,
    /// Opaque data for the engine behind the prefiller, such as the prompt.
    #[serde(with = "bytes")]
    pub payload: Vec<u8>,
}

/// The state of a request at its prefiller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RequestState {
    /// The request has not arrived.
    Unknown,
    /// Waiting, or its pages are being computed and written.
    Open,
    /// All pages are written, and nothing is under way.
    Done,
    /// The decoder cancelled it, and nothing is under way.
    Cancelled,
    /// The prefiller failed it, and nothing is under way.
    Failed(String),
    /// The prefiller refused it. `elsewhere`: it is valid, and another prefiller may accept it.
    Refused {
        why: String,
        elsewhere: bool,
        #[serde(default)]
        reason: RefusalReason,
    },
}

/// Why a request was refused, for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalReason {
    /// The text has the reason.
    #[default]
    Other,
    /// The prefiller has too many requests; it may accept this one later.
    Busy,
    /// The prompt needs more pages than the prefiller has.
    TooLong,
}

impl RequestState {
    fn reason(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::Refused { why, .. } => Some(why),
            Self::Unknown | Self::Open | Self::Done | Self::Cancelled => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    Hello(Box<Hello>),
    /// Accepts a session. `incarnation` is the prefiller's number of it. A prefiller that forgot a
    /// session gives another number.
    Welcome {
        session: u64,
        incarnation: u64,
    },
    Declined {
        session: u64,
        why: String,
    },
    /// Valid only in its incarnation: the pages of an earlier one may have other owners now.
    Request {
        session: u64,
        incarnation: u64,
        request: Box<Request>,
    },
    Cancel {
        session: u64,
        seq: u64,
    },
    /// A heartbeat, with the requests that the decoder still waits for. All requests before
    /// `floor` are over for it. `leases` are renewed: the decoder will request their pages.
    Beat {
        session: u64,
        floor: u64,
        open: Vec<u64>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        leases: Vec<u64>,
    },
    /// Answers a beat; also sent when a request ends.
    Status {
        session: u64,
        incarnation: u64,
        states: Vec<(u64, RequestState)>,
    },
    /// One side ends the session.
    Goodbye {
        session: u64,
        why: String,
    },
}

/// Page numbers as runs of consecutive ones: the first page, and the length.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct PageTable(Vec<(u32, u32)>);

impl PageTable {
    pub fn of(pages: &[u32]) -> Self {
        let mut stretches: Vec<(u32, u32)> = Vec::new();
        for &page in pages {
            match stretches.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(page) => *count += 1,
                _ => stretches.push((page, 1)),
            }
        }
        Self(stretches)
    }

    /// The page numbers, if there are `should` of them. A few bytes can claim any number of pages,
    /// so the caller bounds `should`.
    pub fn pages(&self, should: u64) -> Result<Vec<u32>, String> {
        let total: u64 = self.0.iter().map(|s| u64::from(s.1)).sum();
        if total != should {
            return Err(format!("a table of {total} pages, where the tokens fill {should}"));
        }
        let mut pages = Vec::with_capacity(total as usize);
        for &(first, count) in &self.0 {
            let end = first.checked_add(count).ok_or("a page number passes 2^32")?;
            pages.extend(first..end);
        }
        Ok(pages)
    }
}

/// Encodes `Vec<u8>` as one byte string, not as numbers.
mod bytes {
    use serde::{de, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], s: S) -> Result<S::Ok, S::Error> {
        s.serialize_bytes(bytes)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u8>, D::Error> {
        struct Bytes;
        impl de::Visitor<'_> for Bytes {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: de::Error>(self, v: &[u8]) -> Result<Vec<u8>, E> {
                Ok(v.to_vec())
            }
        }
        d.deserialize_bytes(Bytes)
    }
}

/// A body behind the mark and the version.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    [&MARK[..], &[VERSION], body].concat()
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut out = MARK.to_vec();
    out.push(VERSION);
    // Writing our own plain values into memory has no way to fail.
    out.extend(rmp_serde::to_vec_named(value).unwrap_or_default());
    out
}

fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, EngineError> {
    decode_within(READS, what, bytes)
}

fn decode_within<T: DeserializeOwned>(
    reads: RangeInclusive<u8>,
    what: &'static str,
    bytes: &[u8],
) -> Result<T, EngineError> {
    let fail = |cause: String| EngineError::Decode { what, cause };
    let Some((head, body)) = bytes.split_at_checked(MARK.len() + 1) else {
        return Err(fail(format!("{} bytes are too few", bytes.len())));
    };
    if head[..MARK.len()] != MARK {
        return Err(fail("it does not begin with the mark of one".into()));
    }
    let version = head[MARK.len()];
    if !reads.contains(&version) {
        return Err(fail(format!(
            "its version is {version}, this build speaks {VERSION}; upgrade the older side"
        )));
    }
    rmp_serde::from_slice(body).map_err(|e| fail(e.to_string()))
}

impl Offer {
    pub fn to_bytes(&self) -> Vec<u8> {
        encode(self)
    }

    /// # Errors
    /// [`EngineError::Decode`] says which rule was broken.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EngineError> {
        let offer: Self = decode("a prefiller's offer", bytes)?;
        let mut ranks: Vec<u32> =
            offer.ends.iter().flat_map(|e| &e.ranks).map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        if !ranks.iter().copied().eq(0..offer.layouts.len() as u32) {
            let cause = format!(
                "its processes have the ranks {ranks:?}, not each of {} once",
                offer.layouts.len()
            );
            return Err(EngineError::Decode { what: "a prefiller's offer", cause });
        }
        Ok(offer)
    }
}

impl Message {
    pub fn to_bytes(&self) -> Vec<u8> {
        encode(self)
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EngineError> {
        decode("a KV message", bytes)
    }

    /// A beat, in as many messages as it needs.
    pub fn beats(session: u64, floor: u64, open: &[u64], leases: &[u64]) -> Vec<Self> {
        let part = |numbers: &[u64], i: usize| {
            numbers.chunks(BEAT_NUMBERS).nth(i).unwrap_or_default().to_vec()
        };
        let count = open.len().max(leases.len()).div_ceil(BEAT_NUMBERS).max(1);
        let beat = |i| Self::Beat { session, floor, open: part(open, i), leases: part(leases, i) };
        (0..count).map(beat).collect()
    }

    /// States, in as many messages as they need.
    pub fn statuses(session: u64, incarnation: u64, states: Vec<(u64, RequestState)>) -> Vec<Self> {
        let mut all: Vec<Vec<(u64, RequestState)>> = vec![Vec::new()];
        let mut bytes = 0;
        for (seq, state) in states {
            // A number, a name and what is around them.
            let cost = 32 + state.reason().map_or(0, |why| 40 + why.len());
            bytes += cost;
            if bytes > STATUS_BYTES {
                bytes = cost;
                all.push(Vec::new());
            }
            if let Some(last) = all.last_mut() {
                last.push((seq, state));
            }
        }
        all.into_iter().map(|states| Self::Status { session, incarnation, states }).collect()
    }

    pub fn session(&self) -> u64 {
        match self {
            Self::Hello(hello) => hello.session,
            Self::Welcome { session, .. }
            | Self::Declined { session, .. }
            | Self::Request { session, .. }
            | Self::Cancel { session, .. }
            | Self::Beat { session, .. }
            | Self::Status { session, .. }
            | Self::Goodbye { session, .. } => *session,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: Message =
        Message::Beat { session: 7, floor: 3, open: Vec::new(), leases: Vec::new() };

    fn of_version(version: u8) -> Vec<u8> {
        let mut bytes = BEAT.to_bytes();
        bytes[MARK.len()] = version;
        bytes
    }

    fn read(reads: RangeInclusive<u8>, version: u8) -> Result<Message, String> {
        decode_within(reads, "a KV message", &of_version(version)).map_err(|e| e.to_string())
    }

    #[test]
    fn ends_one_version_apart_understand_each_other() {
        // The newer release reads both and writes the older one, which is all that the older
        // release reads.
        let (older, newer) = (VERSION..=VERSION, VERSION..=VERSION + 1);
        assert_eq!(read(newer.clone(), VERSION), Ok(BEAT));
        assert_eq!(read(older, VERSION), Ok(BEAT));
        // The release after it writes the newer one.
        assert_eq!(read(newer, VERSION + 1), Ok(BEAT));
    }

    #[test]
    fn an_end_of_another_version_is_refused_with_both() {
        let why = read(READS, VERSION + 2).unwrap_err();
        let said = format!("its version is {}, this build speaks {VERSION}", VERSION + 2);
        assert!(why.contains(&said), "{why}");
        assert!(read(READS, VERSION - 1).is_err());
    }

    #[test]
    fn what_a_later_release_adds_to_a_message_is_skipped() {
        #[derive(Serialize)]
        enum Later {
            Beat { session: u64, hope: Vec<String>, floor: u64, open: Vec<u64> },
        }
        let hope = vec!["of a later release".to_owned()];
        let bytes = encode(&Later::Beat { session: 7, hope, floor: 3, open: Vec::new() });
        assert_eq!(Message::from_bytes(&bytes), Ok(BEAT));
    }
}
