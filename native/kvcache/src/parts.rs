//! Messages that are longer than what an engine carries go in parts.
//!
//! Parts may come in any order, twice or not at all, like messages. The sender learns by its beats
//! that a message was lost, whole or in part.

use std::{borrow::Cow, cmp::Reverse, collections::BTreeMap, time::Duration};

use fabric_engine::{api::EngineId, locks::Mutex, EngineError, Time, TransferEngine};

use crate::terms::Terms;

const MARK: [u8; 3] = *b"FKP";
/// Bumped when a part's meaning changes.
const VERSION: u8 = 1;
/// Mark and version, the message's number, its length, the length of its parts, and which of them
/// this is.
const HEADER: usize = 4 + 8 + 4 + 4 + 4;
/// Parts are as long as an engine carries them; shorter ones would only have many of them noted.
const MIN_PART_BYTES: usize = 256;
/// Messages of one peer of which parts are missing; of more, the oldest is forgotten.
const OPEN_EACH: usize = 64;

/// A message as it is sent: in one piece if the engine carries it.
pub(crate) fn cut<'a>(message: &'a [u8], engine: &TransferEngine) -> Vec<Cow<'a, [u8]>> {
    let limit = engine.max_message();
    match message.len() <= limit {
        true => vec![Cow::Borrowed(message)],
        false => pieces(message, limit, engine.number()).map(Cow::Owned).collect(),
    }
}

fn pieces(message: &[u8], limit: usize, number: u64) -> impl Iterator<Item = Vec<u8>> + '_ {
    let size = limit.saturating_sub(HEADER).max(MIN_PART_BYTES);
    message.chunks(size).enumerate().map(move |(index, bytes)| {
        let part = Part { number, total: message.len(), size, index, bytes };
        part.to_bytes()
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part<'a> {
    /// Of the message: never twice from one engine.
    number: u64,
    /// Bytes of the message.
    total: usize,
    /// Bytes of every part but the last.
    size: usize,
    index: usize,
    bytes: &'a [u8],
}

impl<'a> Part<'a> {
    fn to_bytes(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + self.bytes.len());
        out.extend(MARK);
        out.push(VERSION);
        out.extend(self.number.to_le_bytes());
        for value in [self.total, self.size, self.index] {
            // Messages are of 2^28 bytes at most.
            out.extend((value as u32).to_le_bytes());
        }
        out.extend(self.bytes);
        out
    }

    /// None if it isn't a part; what is wrong with it otherwise.
    fn from_bytes(bytes: &'a [u8]) -> Option<Result<Self, String>> {
        if !bytes.starts_with(&MARK) {
            return None;
        }
        Some(Self::parse(bytes))
    }

    fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let Some((head, bytes)) = bytes.split_at_checked(HEADER) else {
            return Err(format!("{} bytes are too few", bytes.len()));
        };
        if head[3] != VERSION {
            return Err(format!(
                "its version is {}, this build speaks {VERSION}; upgrade the older side",
                head[3]
            ));
        }
        let word = |at: usize| {
            let value: [u8; 4] = head[at..at + 4].try_into().unwrap_or_default();
            u32::from_le_bytes(value) as usize
        };
        let number = u64::from_le_bytes(head[4..12].try_into().unwrap_or_default());
        let part = Self { number, total: word(12), size: word(16), index: word(20), bytes };
        let begin = part.index.checked_mul(part.size).filter(|begin| *begin < part.total);
        let rest = begin.map(|begin| (part.total - begin).min(part.size));
        match rest == Some(bytes.len()) && part.size >= MIN_PART_BYTES && part.size < part.total {
            true => Ok(part),
            false => Err(format!(
                "{} bytes are not part {} of {} bytes in parts of {}",
                bytes.len(),
                part.index,
                part.total,
                part.size
            )),
        }
    }
}

/// Reassembles messages, within bounds for any input.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The longest message that is taken.
    max_message: usize,
    /// Bytes of all messages of which parts are missing.
    max_bytes: u64,
    /// For how long the missing parts are waited for.
    timeout: Duration,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    messages: BTreeMap<(EngineId, u64), Incomplete>,
    bytes: u64,
}

#[derive(Debug)]
struct Incomplete {
    bytes: Vec<u8>,
    size: usize,
    here: Vec<bool>,
    missing: usize,
    since: Time,
}

impl Parts {
    pub fn new(terms: &Terms) -> Self {
        Self {
            max_message: terms.max_message,
            max_bytes: terms.max_payloads,
            timeout: terms.silence,
            open: Mutex::default(),
        }
    }

    /// The message that is whole now: what came, or what came with it before.
    ///
    /// # Errors
    /// [`EngineError::Decode`] if it is a part of nothing that could be.
    pub fn join<'a>(
        &self,
        from: EngineId,
        came: &'a [u8],
        now: Time,
    ) -> Result<Option<Cow<'a, [u8]>>, EngineError> {
        let wrong = |cause: String| EngineError::Decode { what: "a part of a KV message", cause };
        let part = match Part::from_bytes(came) {
            None => return Ok(Some(Cow::Borrowed(came))),
            Some(part) => part.map_err(wrong)?,
        };
        if part.total > self.max_message {
            return Err(wrong(format!(
                "it is of {} bytes, and {} are taken; raise max_message here",
                part.total, self.max_message
            )));
        }
        let mut open = self.open.lock();
        if !open.messages.contains_key(&(from, part.number)) {
            // Without a session no beat would remove it.
            open.expire(now, self.timeout);
        }
        let whole = open.add(from, part, now, self.max_bytes).map_err(wrong)?;
        Ok(whole.map(Cow::Owned))
    }

    /// Removes messages whose missing parts are overdue.
    pub fn expire(&self, now: Time) {
        self.open.lock().expire(now, self.timeout);
    }
}

impl Open {
    fn expire(&mut self, now: Time, timeout: Duration) {
        let late = self.messages.iter().filter(|(_, m)| now.since(m.since) > timeout);
        let late: Vec<(EngineId, u64)> = late.map(|(key, _)| *key).collect();
        late.into_iter().for_each(|key| drop(self.remove(key)));
    }

    fn add(
        &mut self,
        from: EngineId,
        part: Part<'_>,
        now: Time,
        max_bytes: u64,
    ) -> Result<Option<Vec<u8>>, String> {
        let key = (from, part.number);
        if !self.messages.contains_key(&key) {
            self.make_room(from, part.total as u64, max_bytes);
            let parts = part.total.div_ceil(part.size);
            let message = Incomplete {
                bytes: vec![0; part.total],
                size: part.size,
                here: vec![false; parts],
                missing: parts,
                since: now,
            };
            self.bytes += part.total as u64;
            self.messages.insert(key, message);
        }
        let Some(message) = self.messages.get_mut(&key) else { return Ok(None) };
        if (message.bytes.len(), message.size) != (part.total, part.size) {
            return Err(format!("message {} was of another length before", part.number));
        }
        if std::mem::replace(&mut message.here[part.index], true) {
            return Ok(None);
        }
        let begin = part.index * part.size;
        message.bytes[begin..begin + part.bytes.len()].copy_from_slice(part.bytes);
        message.missing -= 1;
        let whole = message.missing == 0;
        Ok(whole.then(|| self.remove(key)).flatten())
    }

    /// A sender that exceeds its room loses its oldest message, and so does the sender that holds
    /// the most.
    fn make_room(&mut self, from: EngineId, nbytes: u64, max_bytes: u64) {
        let theirs = self.messages.range((from, 0)..=(from, u64::MAX));
        let full = theirs.clone().count() >= OPEN_EACH;
        let oldest = theirs.min_by_key(|(_, m)| m.since).map(|(key, _)| *key);
        if let Some(key) = oldest.filter(|_| full) {
            self.remove(key);
        }
        while self.bytes + nbytes > max_bytes {
            let Some(key) = self.most_dispensable((from, nbytes)) else { return };
            self.remove(key);
        }
    }

    /// The oldest message of the peer that holds the most, with what one of them is to hold in
    /// addition.
    fn most_dispensable(&self, (from, nbytes): (EngineId, u64)) -> Option<(EngineId, u64)> {
        let mut peers: BTreeMap<EngineId, (u64, Time, u64)> = BTreeMap::new();
        for ((peer, number), message) in &self.messages {
            let own = if *peer == from { nbytes } else { 0 };
            let (held, since, oldest) = peers.entry(*peer).or_insert((own, Time::NEVER, 0));
            *held += message.bytes.len() as u64;
            if message.since < *since {
                (*since, *oldest) = (message.since, *number);
            }
        }
        // Of those that hold as much, whose message is the oldest.
        let most = peers.iter().max_by_key(|(_, (held, since, _))| (*held, Reverse(*since)));
        most.map(|(peer, (_, _, oldest))| (*peer, *oldest))
    }

    fn remove(&mut self, key: (EngineId, u64)) -> Option<Vec<u8>> {
        let message = self.messages.remove(&key)?;
        self.bytes -= message.bytes.len() as u64;
        Some(message.bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FROM: EngineId = EngineId([7; 16]);
    const LIMIT: usize = HEADER + 300;

    fn parts(max_message: usize, max_payloads: u64) -> Parts {
        Parts::new(&Terms { max_message, max_payloads, ..Terms::default() })
    }

    fn message(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn cut_up(message: &[u8], number: u64) -> Vec<Vec<u8>> {
        pieces(message, LIMIT, number).collect()
    }

    proptest! {
        #[test]
        fn a_message_is_whole_when_its_last_part_has_come_and_not_before(
            len in 301usize..5000,
            seed in any::<u64>(),
        ) {
            let (parts, message) = (parts(1 << 20, 1 << 28), message(len));
            let mut draw = fastrand::Rng::with_seed(seed);
            let mut pieces = cut_up(&message, 1);
            prop_assert!(pieces.iter().all(|piece| piece.len() <= LIMIT));
            draw.shuffle(&mut pieces);
            let last = pieces.pop().unwrap();
            let again = pieces.clone();
            for piece in pieces.iter().chain(&again) {
                prop_assert_eq!(parts.join(FROM, piece, Time(1)), Ok(None));
            }
            let whole = parts.join(FROM, &last, Time(1)).unwrap();
            prop_assert_eq!(whole.as_deref(), Some(&message[..]));
            prop_assert_eq!(parts.open.lock().bytes, 0);
        }

        #[test]
        fn any_bytes_are_refused_or_safe(
            number in 0u64..3,
            total in 0u32..4000,
            size in prop_oneof![0u32..4000, Just(300u32)],
            index in 0u32..20,
            len in prop_oneof![0usize..400, Just(300usize)],
        ) {
            let parts = parts(4096, 8192);
            parts.join(FROM, &cut_up(&message(900), 1)[0], Time(1)).unwrap();
            let (total, size, index) = (total as usize, size as usize, index as usize);
            let bytes = message(len);
            let part = Part { number, total, size, index, bytes: &bytes }.to_bytes();
            let _ = parts.join(FROM, &part, Time(2));
            let _ = parts.join(FROM, &part[..part.len().min(len)], Time(2));
            prop_assert!(parts.open.lock().bytes <= 8192);
        }
    }

    #[test]
    fn parts_of_several_messages_and_peers_are_told_apart() {
        let (parts, other) = (parts(1 << 20, 1 << 28), EngineId([8; 16]));
        let (long, longer) = (message(800), message(1200));
        let told = [(FROM, 1, &long), (FROM, 2, &longer), (other, 1, &longer)];
        let mut whole = 0;
        for turn in 0..4 {
            for (from, number, message) in told {
                let pieces = cut_up(message, number);
                let Some(piece) = pieces.get(turn) else { continue };
                if let Some(joined) = parts.join(from, piece, Time(1)).unwrap() {
                    assert_eq!(&joined[..], &message[..]);
                    whole += 1;
                }
            }
        }
        assert_eq!(whole, 3);
        let short = b"not a part".as_slice();
        assert_eq!(parts.join(FROM, short, Time(1)).unwrap().as_deref(), Some(short));
    }

    #[test]
    fn what_never_becomes_whole_is_bounded_and_forgotten() {
        let parts = parts(4096, 10_000);
        for number in 0..1000u64 {
            let peer = EngineId([(number % 5) as u8; 16]);
            let first = &cut_up(&message(4000), number)[0];
            assert_eq!(parts.join(peer, first, Time(number)), Ok(None));
            assert!(parts.open.lock().bytes <= 10_000);
        }
        // The latest is still waited for.
        let pieces = cut_up(&message(4000), 999);
        let peer = EngineId([4; 16]);
        let ends = pieces[1..].iter().filter_map(|p| parts.join(peer, p, Time(1000)).unwrap());
        assert_eq!(ends.count(), 1);
        parts.expire(Time(999).after(parts.timeout + Duration::from_secs(1)));
        let open = parts.open.lock();
        assert_eq!((open.messages.len(), open.bytes), (0, 0));
    }

    #[test]
    fn who_holds_the_most_makes_room_and_not_who_came_first() {
        let parts = parts(4096, 10_000);
        let small = cut_up(&message(400), 1);
        parts.join(EngineId([1; 16]), &small[0], Time(1)).unwrap();
        for number in 0..100 {
            parts.join(FROM, &cut_up(&message(4000), number)[0], Time(2 + number)).unwrap();
        }
        let whole = parts.join(EngineId([1; 16]), &small[1], Time(200)).unwrap();
        assert_eq!(whole.as_deref(), Some(&message(400)[..]));
    }

    #[test]
    fn what_is_late_is_forgotten_when_the_next_message_comes() {
        let parts = parts(4096, 1 << 28);
        parts.join(FROM, &cut_up(&message(4000), 1)[0], Time(1)).unwrap();
        let late = Time(1).after(parts.timeout + Duration::from_secs(1));
        parts.join(FROM, &cut_up(&message(400), 2)[0], late).unwrap();
        assert_eq!(parts.open.lock().bytes, 400);
    }

    #[test]
    fn one_peer_has_so_many_messages_open() {
        let parts = parts(4096, 1 << 28);
        for number in 0..2 * OPEN_EACH as u64 {
            parts.join(FROM, &cut_up(&message(400), number)[0], Time(number)).unwrap();
        }
        let open = parts.open.lock();
        let kept: Vec<u64> = open.messages.keys().map(|(_, number)| *number).collect();
        assert_eq!(kept, (OPEN_EACH as u64..2 * OPEN_EACH as u64).collect::<Vec<_>>());
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_by_its_first_part() {
        let parts = parts(4096, 1 << 28);
        let error = parts.join(FROM, &cut_up(&message(4097), 1)[3], Time(1)).unwrap_err();
        assert!(error.to_string().contains("it is of 4097 bytes, and 4096 are taken"), "{error}");
        assert_eq!(parts.open.lock().messages.len(), 0);
    }
}
