//! Healing: sends again what a lost link did not deliver (IC-3, IC-4, MR-1).
//!
//! Bytes may be written twice, counts may not. So the sender asks the peer over another link to end
//! the lost link on its side, and to report what arrived. After the answer nothing can land over
//! the lost link, and the sender knows what is missing. It sends missing bytes without counts, and
//! after their acknowledgement the missing counts. Without an answer the transfers fail. The
//! protocol: `docs/design/healing.md`.

use std::collections::{HashMap, VecDeque};

use super::{
    backlog::Waiting,
    delivered::{self, Delivered},
    ledger::Slice,
    messages::{Arrived, GroupMessage, MAX_NUMBERS},
    route::{ActiveLink, PeerKey, PeerState, Route},
    slices::BoundOp,
    timers::Timer,
    Group, GroupEvents, Rails, TransferKey,
};
use crate::{
    api::EngineAddress,
    domain::{DomainError, LinkId, LinkName, Receipt, Receipts, Token, WorkRequest},
    time::Time,
    EngineError,
};

/// The cause with which a link is ended because the peer has lost it.
const LOST_BY_PEER: &str = "the peer has lost it";
/// Maximum number of transmissions of a slice.
const MAX_TRIES: u8 = 8;
/// Maximum number of receipts that are kept for a peer.
const MAX_RECEIPTS: usize = 32;
/// Maximum number of a peer's questions that wait for a link to end.
const MAX_QUESTIONS: usize = 1024;

/// The lost links of one peer.
#[derive(Default)]
pub(super) struct Healing {
    /// Slices that completed with an error, until their link is down.
    failed_slices: Vec<(Token, Slice)>,
    unresolved: Vec<UnresolvedSlices>,
    asked: u32,
    /// Receipts of ended links, for which the peer may ask.
    receipts: VecDeque<(LinkName, Receipt)>,
    /// The peer's questions about links that have not ended here.
    questions: Vec<LinkQuery>,
}

/// Slices of a lost link, until the peer reports which of them arrived.
struct UnresolvedSlices {
    id: u32,
    name: LinkName,
    rail: usize,
    cause: DomainError,
    kind: Receipts,
    /// Counts that were acknowledged before the loss.
    acked: u64,
    slices: Vec<Slice>,
    asked_by: Option<(usize, LinkId)>,
    until: Time,
}

/// A peer's question about a link that it has lost.
struct LinkQuery {
    id: u32,
    name: LinkName,
    numbers: Vec<u64>,
    via: (usize, LinkId),
}

impl Healing {
    pub fn add_failed(&mut self, token: Token, slice: Slice) {
        self.failed_slices.push((token, slice));
    }

    /// Takes the slices of a link that is down, with their numbers on the link.
    fn take_failed(&mut self, link: (usize, LinkId), numbers: &[(Token, u64)]) -> Vec<Slice> {
        let failed_slices = std::mem::take(&mut self.failed_slices);
        let (ours, others): (Vec<_>, _) =
            failed_slices.into_iter().partition(|(_, s)| s.link == link);
        self.failed_slices = others;
        let numbers: HashMap<Token, u64> = numbers.iter().copied().collect();
        let named = |(token, slice)| Slice { number: numbers.get(&token).copied(), ..slice };
        ours.into_iter().map(named).collect()
    }

    /// Whether neither side waits for an answer of the other.
    pub fn is_idle(&self) -> bool {
        self.failed_slices.is_empty() && self.unresolved.is_empty() && self.questions.is_empty()
    }

    /// Whether no link of the peer has ended here.
    pub fn is_unmet(&self) -> bool {
        self.receipts.is_empty()
    }

    /// Takes all slices that wait, because the peer is lost.
    pub fn take_all(&mut self) -> Vec<Slice> {
        let failed_slices = std::mem::take(&mut self.failed_slices).into_iter().map(|(_, s)| s);
        let unresolved = std::mem::take(&mut self.unresolved).into_iter().flat_map(|l| l.slices);
        failed_slices.chain(unresolved).collect()
    }

    pub fn keep_receipt(&mut self, name: LinkName, receipt: Receipt) {
        if self.receipts.len() >= MAX_RECEIPTS {
            self.receipts.pop_front();
        }
        self.receipts.push_back((name, receipt));
    }

    /// Whether a link of this name was up and is down.
    fn is_over(&self, name: LinkName) -> bool {
        self.receipts.iter().any(|(n, _)| *n == name)
    }

    /// The answer to a question about a link that is down here. A link that never was up may still
    /// come up, so its answer is `Unknown`.
    fn arrived(&self, name: LinkName, numbers: &[u64]) -> Arrived {
        let receipt = self.receipts.iter().rev().find(|(n, _)| *n == name);
        match receipt.map(|(_, r)| r) {
            None | Some(Receipt::Unknown) => Arrived::Unknown,
            Some(Receipt::InOrder(n)) => Arrived::InOrder(*n),
            Some(Receipt::Numbered(completed)) => {
                let each: Option<Vec<bool>> =
                    numbers.iter().map(|n| completed.contains(*n)).collect();
                each.map_or(Arrived::Unknown, Arrived::These)
            }
        }
    }
}

impl Group {
    /// Handles the loss of a link of a peer. Other links may be up.
    pub(super) fn on_link_lost(
        &mut self,
        now: Time,
        peer: PeerKey,
        (link, cause): (&ActiveLink, &DomainError),
        (receipt, numbers): (Receipt, &[(Token, u64)]),
        rails: &mut Rails,
    ) {
        let place = (link.pair.rail, link.id);
        let route = &mut self.peers[peer as usize];
        route.keep_receipt(now, link.name, receipt);
        let healing = &mut route.healing;
        for entry in healing.unresolved.iter_mut().filter(|l| l.asked_by == Some(place)) {
            entry.asked_by = None;
        }
        let slices = healing.take_failed(place, numbers);
        self.answer_all(peer, link.name, rails);
        let (back, lost): (Vec<_>, Vec<_>) =
            slices.into_iter().partition(|s| matches!(s.wr, WorkRequest::Read { .. }));
        // Nothing lands here over this link any more. A read that did not complete is read again,
        // and never reported as done (RS-1).
        back.into_iter().for_each(|s| self.send_again(s, 0, rails));
        self.drain_backlog(now, peer, rails);
        let kind = self.policy.receipts(&*rails[place.0]);
        // The peer can't tell about work without a number.
        let (lost, nameless): (Vec<_>, Vec<_>) =
            lost.into_iter().partition(|s| kind != Receipts::Numbered || s.number.is_some());
        self.give_up(now, peer, nameless, (rails, place.0, cause));
        if !lost.is_empty() {
            let n = lost.len();
            tracing::debug!(peer = %self.peers[peer as usize].address.label(), n, "slices are unresolved");
            let until = now.after(self.policy.peer_timeout);
            self.timers.set(until, Timer::Receipts(peer));
            let most = if kind == Receipts::Numbered { MAX_NUMBERS } else { usize::MAX };
            let healing = &mut self.peers[peer as usize].healing;
            let mut lost = lost.into_iter().peekable();
            while lost.peek().is_some() {
                healing.asked = healing.asked.wrapping_add(1);
                healing.unresolved.push(UnresolvedSlices {
                    id: healing.asked,
                    name: link.name,
                    rail: place.0,
                    cause: cause.clone(),
                    kind,
                    acked: link.acked,
                    slices: lost.by_ref().take(most).collect(),
                    asked_by: None,
                    until,
                });
            }
        }
        // A question that was lost with this link is asked again, too.
        self.query_lost_links(now, peer, rails);
    }

    /// Asks the peer which slices of lost links arrived, over a link that is up.
    pub(super) fn query_lost_links(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        if route.state != PeerState::Up || route.healing.unresolved.is_empty() {
            return;
        }
        let policy = self.policy;
        let heals = |l: &&ActiveLink| policy.receipts(&*rails[l.pair.rail]) != Receipts::None;
        let able: Vec<_> =
            route.active().iter().filter(heals).map(|l| (l.pair.rail, l.id)).collect();
        if able.is_empty() {
            // The transport that replaced the lost one carries no group frames.
            for l in std::mem::take(&mut route.healing.unresolved) {
                self.give_up(now, peer, l.slices, (rails, l.rail, &l.cause));
            }
            return;
        }
        for entry in route.healing.unresolved.iter_mut().filter(|l| l.asked_by.is_none()) {
            // A link of another rail is less likely to be lost next.
            let via = able.iter().find(|(rail, _)| *rail != entry.rail).unwrap_or(&able[0]);
            entry.asked_by = Some(*via);
            // For an ordered link the number of counts is enough.
            let numbered = entry.kind == Receipts::Numbered;
            let slices = entry.slices.iter().filter(|_| numbered);
            let numbers = slices.filter_map(|s| s.number).collect();
            let message = GroupMessage::Lost { id: entry.id, name: entry.name, numbers };
            rails[via.0].send_group_frame(via.1, message.encode());
        }
    }

    pub(super) fn on_group_frame(
        &mut self,
        now: Time,
        via: (usize, LinkId),
        frame: &[u8],
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let Some(peer) = self.links.get(&via).copied() else { return };
        match GroupMessage::decode(frame) {
            Ok(GroupMessage::Lost { id, name, numbers }) if numbers.len() <= MAX_NUMBERS => {
                self.on_question(peer, LinkQuery { id, name, numbers, via }, rails);
            }
            Ok(GroupMessage::Ended { id, came }) => {
                let unresolved = &mut self.peers[peer as usize].healing.unresolved;
                let Some(at) = unresolved.iter().position(|l| l.id == id) else { return };
                let entry = unresolved.remove(at);
                self.resolve(now, peer, entry, came, rails, events);
            }
            Ok(GroupMessage::Want(wants)) => self.on_want(now, peer, wants, rails),
            Ok(GroupMessage::Credit(bytes)) => self.on_credit(peer, bytes),
            Ok(GroupMessage::Lost { .. }) => {
                rails[via.0].disconnect(via.1, "it asks for too much at once")
            }
            Err(e) => rails[via.0].disconnect(via.1, &e.to_string()),
        }
    }

    /// Handles a question. The link must end here before the answer.
    fn on_question(&mut self, peer: PeerKey, question: LinkQuery, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        let via = question.via;
        let wait = |route: &mut Route, question| {
            if route.healing.questions.len() < MAX_QUESTIONS {
                route.healing.questions.push(question);
            }
        };
        match route.named(question.name) {
            None if route.healing.is_over(question.name) => self.answer(peer, &question, rails),
            // The peer may have lost the link before it was used.
            None => match rails.iter_mut().any(|r| r.end_unused(question.name, LOST_BY_PEER)) {
                true => wait(route, question),
                false => self.answer(peer, &question, rails),
            },
            // The peer can't have lost the link over which it asks.
            Some(same) if same == via => {
                rails[via.0].disconnect(via.1, "it asks about this very link");
            }
            Some((rail, link)) => {
                wait(route, question);
                rails[rail].disconnect(link, LOST_BY_PEER);
            }
        }
    }

    /// Handles the end of a link that the peer began and never used.
    pub(super) fn on_unused(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        (name, receipt): (LinkName, Receipt),
        rails: &mut Rails,
    ) {
        let peer = self.peer(peer);
        self.peers[peer as usize].keep_receipt(now, name, receipt);
        self.answer_all(peer, name, rails);
    }

    /// Answers the peer's questions about a link that is down.
    fn answer_all(&mut self, peer: PeerKey, name: LinkName, rails: &mut Rails) {
        let questions = &mut self.peers[peer as usize].healing.questions;
        let (ready, waiting): (Vec<_>, _) =
            std::mem::take(questions).into_iter().partition(|q| q.name == name);
        *questions = waiting;
        ready.into_iter().for_each(|q| self.answer(peer, &q, rails));
    }

    fn answer(&mut self, peer: PeerKey, question: &LinkQuery, rails: &mut Rails) {
        // If the link of the question is down, the peer asks again over another.
        if self.links.contains_key(&question.via) {
            let healing = &self.peers[peer as usize].healing;
            let came = healing.arrived(question.name, &question.numbers);
            let message = GroupMessage::Ended { id: question.id, came };
            rails[question.via.0].send_group_frame(question.via.1, message.encode());
        }
    }

    /// Resolves the slices of a lost link by the peer's answer.
    fn resolve(
        &mut self,
        now: Time,
        peer: PeerKey,
        entry: UnresolvedSlices,
        came: Arrived,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let UnresolvedSlices { slices, kind, acked, rail, cause, .. } = entry;
        let came = match (came, kind) {
            (Arrived::InOrder(all), Receipts::InOrder) => {
                delivered::in_order(slices, all.checked_sub(acked))
            }
            (Arrived::These(each), Receipts::Numbered) => delivered::numbered(slices, &each),
            // The peer has not promised that its end is down (MR-1).
            _ => Err(slices),
        };
        match came {
            Ok(came) => {
                for (slice, delivered) in came {
                    match delivered {
                        Delivered::All => {
                            self.part_over(now, slice.owner, slice.confirm, rails, events);
                        }
                        Delivered::Counts(there) => self.send_again(slice, there, rails),
                    }
                }
                self.drain_backlog(now, peer, rails);
            }
            Err(slices) => self.give_up(now, peer, slices, (rails, rail, &cause)),
        }
    }

    /// Queues a slice ahead of operations that were never posted. Its bytes have no count; the
    /// count follows their acknowledgement. `there` counts of it have arrived, with their bytes.
    fn send_again(&mut self, slice: Slice, there: u32, rails: &Rails) {
        let (key, peer) = (slice.owner, slice.peer);
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.outstanding -= 1;
        if transfer.error.is_none() && slice.tries >= MAX_TRIES {
            let (rail, name) = (slice.link.0, transfer.name);
            let cause = format!("links were lost {MAX_TRIES} times in the middle of it");
            let cause = DomainError::LinkDown(cause);
            let error = self.peers[peer as usize].blame(rails, rail, name, cause);
            self.transfers[key.slot as usize].fail(error);
        }
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.error.is_some() {
            return self.settle(key);
        }
        let op = BoundOp::missing_part(slice, there, transfer);
        transfer.waiting += 1;
        let waiting = Waiting { key, op, since: Time::NEVER };
        self.peers[peer as usize].backlog.push_front(transfer.priority, waiting);
        self.backlogged += 1;
        self.waiters.insert(peer);
    }

    /// A slice won't be made good.
    pub(super) fn slice_lost(&mut self, slice: &Slice, error: EngineError) {
        let key: TransferKey = slice.owner;
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.outstanding -= 1;
        transfer.unproven = true;
        transfer.fail(error);
        self.settle(key);
    }

    /// Gives up slices whose outcome stays unknown. As for every failure of a rail, the group first
    /// decides whether the rail or the peer is lost.
    fn give_up(
        &mut self,
        now: Time,
        peer: PeerKey,
        slices: Vec<Slice>,
        (rails, rail, cause): (&Rails, usize, &DomainError),
    ) {
        for slice in slices {
            let key = slice.owner;
            let transfer = &mut self.transfers[key.slot as usize];
            transfer.outstanding -= 1;
            transfer.unproven = true;
            self.fail(now, key, peer, (rails, rail, cause.clone()));
            self.settle(key);
        }
    }

    /// Gives up on answers that had not come by `began`.
    pub(super) fn expire_unresolved(
        &mut self,
        (began, now): (Time, Time),
        peer: PeerKey,
        rails: &Rails,
    ) {
        let unresolved = &mut self.peers[peer as usize].healing.unresolved;
        let (late, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(unresolved).into_iter().partition(|l| l.until <= began);
        *unresolved = waiting;
        for l in late {
            let why = format!("{}; what had arrived could not be found out in time", l.cause);
            let cause = DomainError::LinkDown(why);
            self.give_up(now, peer, l.slices, (rails, l.rail, &cause));
        }
    }
}
