//! NICs and link ends: the state of one side.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    sync::Arc,
};

use super::wire::ScheduledEvent;
use crate::{
    api::{EngineAddress, EngineId},
    domain::{
        CompletedNumbers, Completion, Count, DomainError, LinkId, LinkName, Receipt, Receipts,
        Token,
    },
    memory::RegionBook,
};

/// One NIC of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Port {
    pub engine: EngineId,
    pub rail: u8,
}

/// A link at one NIC.
pub(crate) type LinkEnd = (Port, LinkId);

/// One end of a link that is up.
pub(crate) struct LinkEndState {
    pub remote: LinkEnd,
    pub name: LinkName,
    completed: CompletedNumbers,
    /// Number of counted writes.
    counted: u64,
    /// Work posted here and not completed, with its numbers.
    pub posted: VecDeque<(Token, u64)>,
    begun: u64,
    /// Work that failed before its link.
    pub failed: Vec<(Token, u64)>,
}

impl LinkEndState {
    pub fn new(remote: LinkEnd, name: LinkName) -> Self {
        Self {
            remote,
            name,
            completed: CompletedNumbers::default(),
            begun: 0,
            failed: Vec::new(),
            counted: 0,
            posted: VecDeque::new(),
        }
    }

    pub fn count(&mut self, count: Count) {
        self.counted += u64::from(count.n);
    }

    /// Enters work; returns the number that the other end records.
    pub fn begin(&mut self, token: Token) -> u64 {
        self.begun += 1;
        self.posted.push_back((token, self.begun));
        self.begun
    }

    /// This end has carried out work of the other end.
    pub fn on_executed(&mut self, number: u64, done: bool) {
        self.completed.record(number, done);
    }

    fn receipt(self, receipts: Receipts) -> Receipt {
        match receipts {
            Receipts::InOrder => Receipt::InOrder(self.counted),
            Receipts::Numbered => Receipt::Numbered(self.completed),
            Receipts::None => Receipt::Unknown,
        }
    }
}

/// A message that waits for room: its link, and the sender to notify.
pub(crate) struct WaitingMessage {
    pub link: LinkId,
    pub message: Arc<[u8]>,
    pub sender: LinkEnd,
    pub token: Token,
}

/// All NICs of a network. Lookups use a hash map; iteration is in the order of ports.
#[derive(Default)]
pub(crate) struct Nodes(HashMap<Port, Node, ByName>);

impl Nodes {
    pub fn get(&self, port: &Port) -> Option<&Node> {
        self.0.get(port)
    }

    pub fn get_mut(&mut self, port: &Port) -> Option<&mut Node> {
        self.0.get_mut(port)
    }

    pub fn insert(&mut self, port: Port, node: Node) {
        self.0.insert(port, node);
    }

    pub fn remove(&mut self, port: &Port) {
        self.0.remove(port);
    }

    pub fn ports(&self) -> Vec<Port> {
        let mut ports: Vec<_> = self.0.keys().copied().collect();
        ports.sort_unstable();
        ports
    }
}

/// For maps keyed by engine or link ids, which are random.
pub(crate) type ByName = BuildHasherDefault<NameHasher>;

#[derive(Default)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        // The map uses bits of both ends, and a product has its best bits in the upper half.
        self.0.rotate_left(26)
    }
}

#[derive(Default)]
pub(crate) struct Node {
    pub book: RegionBook,
    pub inbox: VecDeque<Completion>,
    pub address: Option<EngineAddress>,
    pub links: BTreeMap<LinkId, LinkEndState>,
    /// Whether its cable is unplugged.
    pub unplugged: bool,
    /// Deliveries that wait for the cable.
    pub parked: Vec<ScheduledEvent>,
    /// Number of work requests ever posted.
    pub posts: u64,
    /// Messages that found no room.
    pub waiting: VecDeque<WaitingMessage>,
    /// Bytes per nanosecond in each direction.
    pub rate: Option<f64>,
    /// When everything given to it has been sent, and everything received has been accepted.
    pub sent_at: u64,
    pub in_at: u64,
    next_link: LinkId,
}

impl Node {
    pub fn new(rate: Option<f64>) -> Self {
        Self { rate, ..Self::default() }
    }

    pub fn new_link(&mut self) -> LinkId {
        self.next_link += 1;
        self.next_link
    }

    /// Whether work is posted and not completed.
    pub fn is_posted(&self, link: LinkId, token: Token) -> bool {
        self.links.get(&link).is_some_and(|end| end.posted.iter().any(|(t, _)| *t == token))
    }

    /// Completes a work request, unless it has failed with its link.
    pub fn complete(&mut self, link: LinkId, token: Token, result: Result<(), DomainError>) {
        let Some(end) = self.links.get_mut(&link) else { return };
        let Some(at) = end.posted.iter().position(|(t, _)| *t == token) else { return };
        end.posted.remove(at);
        self.inbox.push_back(Completion::Done { link, token, result });
    }

    /// Ends a link here: its work fails, and nothing lands over it any more.
    pub fn cut(&mut self, link: LinkId, cause: &DomainError, receipts: Receipts) {
        let Some(mut end) = self.links.remove(&link) else { return };
        self.waiting.retain(|h| h.link != link);
        let mut unfinished = Vec::from(std::mem::take(&mut end.posted));
        for (token, _) in unfinished.iter().copied() {
            let result = Err(cause.clone());
            self.inbox.push_back(Completion::Done { link, token, result });
        }
        unfinished.append(&mut end.failed);
        let (receipt, cause) = (end.receipt(receipts), cause.clone());
        self.inbox.push_back(Completion::LinkDown { link, cause, receipt, unfinished });
    }
}
