//! What the two ends tell each other: msgpack behind a mark and a version, so that an end of
//! another version is refused in words.
//!
//! Field names are on the wire: an end that knows more of them than the other loses nothing by it,
//! as long as new ones have defaults. Messages come from peers: decoding is bounded by the message,
//! and what they say is checked where it is used.

use std::ops::RangeInclusive;

use fabric_engine::{
    api::{CounterRef, EngineAddress, RegionDescriptor},
    EngineError,
};
use serde::{de::DeserializeOwned, Deserialize, Serialize};

use crate::layout::CacheLayout;

const MARK: [u8; 3] = *b"FKV";
/// Which is written. Bumped when a message's meaning changes, one release after the new one is
/// first read.
pub const VERSION: u8 = 2;
/// Which are read: never more than the one that is written and a neighbour.
const READS: RangeInclusive<u8> = VERSION..=VERSION;
/// Requests that one beat names: it fits the smallest `max_message`.
pub(crate) const BEAT_REQUESTS: usize = 256;
/// Bytes of states that one status has: it fits the smallest `max_message`.
const STATUS_BYTES: usize = 3072;
/// Bytes of a reason; what is longer is cut.
const REASON_BYTES: usize = 512;

/// What is told of why something ended.
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
    /// Its processes. Together they have every rank once.
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

/// What a decoder's process sends first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Which of this decoder's sessions; later messages name it.
    pub session: u64,
    pub name: String,
    /// Where answers go.
    pub address: EngineAddress,
    /// Of all the decoder's ranks, by number.
    pub layouts: Vec<CacheLayout>,
    /// What may be written, of the ranks in this process.
    pub grants: Vec<Grant>,
    pub tail_nbytes: u64,
    /// Seconds between beats, in thousandths.
    pub beat_ms: u32,
}

/// The memory of one rank of the decoder, for one prefiller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    pub rank: u32,
    /// The layout's buffers, in order.
    pub buffers: Vec<RegionDescriptor>,
    /// Its slots for tails.
    pub tail: Option<RegionDescriptor>,
}

/// A request for the pages of one prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub seq: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// How many of the first ones the decoder has already.
    pub have: u64,
    /// Chooses among replicas.
    pub salt: u64,
    /// The decoder's pages, for each group.
    pub tables: Vec<PageTable>,
    /// What counts arrivals, for each rank of [`Hello::grants`].
    pub counters: Vec<CounterRef>,
    pub tail_slot: u32,
    /// What the engine behind the prefiller needs: the prompt, for example.
    #[serde(with = "bytes")]
    pub payload: Vec<u8>,
}

/// Where a request is, as its prefiller sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RequestState {
    /// No such request has come.
    Unknown,
    /// It waits, or its pages are being computed and written.
    Open,
    /// Everything was written, and nothing of it is under way any more.
    Done,
    /// It was given up for the decoder, and nothing of it is under way any more.
    Cancelled,
    /// It was given up by the prefiller, and nothing of it is under way any more.
    Failed(String),
    /// It was never taken up. `elsewhere`: another prefiller may take it, for nothing is wrong with it.
    Refused {
        why: String,
        elsewhere: bool,
        #[serde(default)]
        reason: RefusalReason,
    },
}

/// Why the engine behind a prefiller refused a request, for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalReason {
    /// Only the text says why.
    #[default]
    Other,
    /// The prefiller has too many requests; it may take this one later.
    Busy,
    /// The prefiller has too few pages for the prompt, however few other requests it has.
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
    /// `incarnation` is the prefiller's number of the session. One that forgot a session and is
    /// greeted again has another.
    Welcome {
        session: u64,
        incarnation: u64,
    },
    Declined {
        session: u64,
        why: String,
    },
    /// Taken only in the incarnation for which it was meant: pages of an earlier one may have
    /// others now.
    Request {
        session: u64,
        incarnation: u64,
        request: Box<Request>,
    },
    Cancel {
        session: u64,
        seq: u64,
    },
    /// That the decoder runs, and what it still waits for. Everything before `floor` is
    /// over for it.
    Beat {
        session: u64,
        floor: u64,
        open: Vec<u64>,
    },
    /// Answers a beat, and is sent unasked when something is over.
    Status {
        session: u64,
        incarnation: u64,
        states: Vec<(u64, RequestState)>,
    },
    /// The decoder is done with this prefiller, or the other way round.
    Goodbye {
        session: u64,
        why: String,
    },
}

/// Page numbers, as stretches of consecutive ones: the first, and how many.
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

    /// The page numbers, if there are as many as should be. A few bytes can claim any number of
    /// them: `should` is to be within reason.
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

/// `Vec<u8>` as one string of bytes, not as numbers.
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

    const BEAT: Message = Message::Beat { session: 7, floor: 3, open: Vec::new() };

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
