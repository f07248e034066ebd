//! NICs and the ends of links: what one side knows.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use super::wire::Scheduled;
use crate::{
    api::{EngineAddress, EngineId},
    domain::{Completion, Count, DomainError, LinkId, LinkName, Receipt, Token},
    memory::RegionBook,
    transport::tally::Tally,
};

/// One NIC of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Port {
    pub engine: EngineId,
    pub rail: u8,
}

/// A link as one side names it.
pub(super) type Side = (Port, LinkId);

/// One end of a link that is up here.
pub(super) struct End {
    pub there: Side,
    pub name: LinkName,
    tally: Tally,
    /// Writes that were counted, whatever their immediates.
    counted: u64,
    /// Work posted here and not completed.
    pub posted: Vec<Token>,
}

impl End {
    pub fn new(there: Side, name: LinkName) -> Self {
        Self { there, name, tally: Tally::default(), counted: 0, posted: Vec::new() }
    }

    pub fn count(&mut self, count: Count) {
        self.tally.add(count);
        self.counted += u64::from(count.n);
    }

    fn receipt(self, ordered: bool) -> Receipt {
        match ordered {
            true => Receipt::InOrder(self.counted),
            false => self.tally.receipt(),
        }
    }
}

/// A message that waits for room: the link it came by, and whom to tell when it is taken.
pub(super) struct Held {
    pub link: LinkId,
    pub message: Arc<[u8]>,
    pub sender: Side,
    pub token: Token,
}

#[derive(Default)]
pub(super) struct Node {
    pub book: RegionBook,
    pub inbox: VecDeque<Completion>,
    pub address: Option<EngineAddress>,
    pub links: BTreeMap<LinkId, End>,
    /// Its cable is out.
    pub unplugged: bool,
    /// What waits for the cable.
    pub parked: Vec<Scheduled>,
    /// Work requests posted ever.
    pub posts: u64,
    /// Messages that found no room.
    pub held: VecDeque<Held>,
    /// Bytes per nanosecond in each direction.
    pub rate: Option<f64>,
    /// When what was given to it so far has left, and when what came so far is in.
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
        self.links.get(&link).is_some_and(|end| end.posted.contains(&token))
    }

    /// Reports a work request as over, once: it may have failed with its link.
    pub fn complete(&mut self, link: LinkId, token: Token, result: Result<(), DomainError>) {
        let Some(end) = self.links.get_mut(&link) else { return };
        let Some(at) = end.posted.iter().position(|t| *t == token) else { return };
        end.posted.remove(at);
        self.inbox.push_back(Completion::Done { link, token, result });
    }

    /// Ends a link here: its work fails, and nothing lands by it any more.
    pub fn cut(&mut self, link: LinkId, cause: &DomainError, ordered: bool) {
        let Some(mut end) = self.links.remove(&link) else { return };
        self.held.retain(|h| h.link != link);
        for token in std::mem::take(&mut end.posted) {
            let result = Err(cause.clone());
            self.inbox.push_back(Completion::Done { link, token, result });
        }
        let receipt = end.receipt(ordered);
        self.inbox.push_back(Completion::LinkDown { link, cause: cause.clone(), receipt });
    }
}
