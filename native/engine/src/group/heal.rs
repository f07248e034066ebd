//! Making good what a lost link had under way (IC-3, IC-4, MR-1).
//!
//! Bytes may be written twice; counts may not. So the side that posted asks the peer, over another link,
//! to end the lost one on its side too and to say what came over it. After that answer nothing of
//! the old link can land any more, and it is known which counts are missing. What had no count is sent
//! again as it is. What had one is sent again without, and when all of it is acknowledged, one write
//! brings the missing counts. If the answer can't be had, the transfers fail: nobody guesses.
//! The protocol and its model: `docs/design/healing.md`.

use std::collections::VecDeque;

use super::{
    ledger::Slice,
    missing,
    notes::{Note, Tally, MAX_IMMS},
    route::{Link, PeerKey, State},
    slices::BoundOp,
    Group, Rails, Sink, TransferKey,
};
use crate::{
    domain::{Count, DomainError, LinkId, LinkName, Receipt, Receipts, WorkRequest},
    time::Time,
    EngineError,
};

/// How often the same bytes are sent at most.
const MAX_TRIES: u8 = 8;
/// Links of a peer whose receipts are remembered.
const MOST_RECEIPTS: usize = 32;
/// Questions of one peer that wait for a link to end.
const MOST_QUESTIONS: usize = 64;

/// What is known of the lost links of one peer.
#[derive(Default)]
pub(super) struct Healing {
    /// Slices that came back with an error, until their link is down.
    fallen: Vec<Slice>,
    limbos: Vec<Limbo>,
    /// What the peer may ask for.
    receipts: VecDeque<(LinkName, Receipt)>,
    /// What it has asked for before our end of that link was down: also by which link.
    questions: Vec<(LinkName, Vec<u32>, (usize, LinkId))>,
}

/// Slices of a lost link, until the peer says what became of them.
struct Limbo {
    name: LinkName,
    rail: usize,
    cause: DomainError,
    kind: Receipts,
    acked: u64,
    /// The immediates in question with what was acknowledged of each; empty if its counts keep order.
    imms: Vec<(u32, u64)>,
    slices: Vec<Slice>,
    asked_by: Option<(usize, LinkId)>,
    until: Time,
}

impl Healing {
    pub fn fall(&mut self, slice: Slice) {
        self.fallen.push(slice);
    }

    fn take_fallen(&mut self, link: (usize, LinkId)) -> Vec<Slice> {
        let (ours, others) =
            std::mem::take(&mut self.fallen).into_iter().partition(|s| s.link == link);
        self.fallen = others;
        ours
    }

    /// Everything that waits, for want of the peer.
    pub fn take_all(&mut self) -> Vec<Slice> {
        let mut slices = std::mem::take(&mut self.fallen);
        slices.extend(std::mem::take(&mut self.limbos).into_iter().flat_map(|l| l.slices));
        slices
    }

    fn keep_receipt(&mut self, name: LinkName, receipt: Receipt) {
        if self.receipts.len() >= MOST_RECEIPTS {
            self.receipts.pop_front();
        }
        self.receipts.push_back((name, receipt));
    }

    /// The answer to a question about a link that is down here.
    fn tally(&self, name: LinkName, imms: &[u32]) -> Option<Tally> {
        let (_, receipt) = self.receipts.iter().rev().find(|(n, _)| *n == name)?;
        Some(match receipt {
            Receipt::Unknown => Tally::Unknown,
            Receipt::InOrder(n) => Tally::InOrder(*n),
            Receipt::ByImm(tallies) => {
                Tally::ByImm(imms.iter().map(|i| tallies.get(i).copied().unwrap_or(0)).collect())
            }
        })
    }
}

impl Group {
    /// A link of a peer is down; other links may be up.
    pub(super) fn mourn(
        &mut self,
        now: Time,
        peer: PeerKey,
        (link, cause, receipt): (&Link, &DomainError, Receipt),
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let place = (link.pair.rail, link.id);
        let healing = &mut self.peers[peer as usize].healing;
        healing.keep_receipt(link.name, receipt);
        healing
            .limbos
            .iter_mut()
            .filter(|l| l.asked_by == Some(place))
            .for_each(|l| l.asked_by = None);
        let slices = healing.take_fallen(place);
        let waiting = std::mem::take(&mut healing.questions);
        let (ready, waiting): (Vec<_>, _) = waiting.into_iter().partition(|q| q.0 == link.name);
        healing.questions = waiting;
        for (name, imms, via) in ready {
            self.answer(peer, name, &imms, via, rails);
        }
        let (back, lost): (Vec<_>, Vec<_>) =
            slices.into_iter().partition(|s| matches!(s.wr, WorkRequest::Read { .. }));
        // A read's bytes land here, and nothing of this link does any more.
        self.return_all(now, peer, back, rails, sink);
        if lost.is_empty() {
            // A question may have been lost with this link.
            return self.ask(peer, rails, sink);
        }
        tracing::debug!(
            peer = %self.peers[peer as usize].address.label(),
            slices = lost.len(),
            "a lost link had work under way"
        );
        let until = now.after(self.policy.peer_timeout);
        let kind = rails[place.0].receipts();
        if kind == Receipts::ByImm && !link.acked.is_complete() {
            self.give_up(peer, lost, (rails, place.0, cause), sink);
            return self.ask(peer, rails, sink);
        }
        let limbos = &mut self.peers[peer as usize].healing.limbos;
        for (imms, slices) in missing::questions(lost, kind, &link.acked) {
            let (cause, acked) = (cause.clone(), link.acked.all);
            let (name, rail) = (link.name, place.0);
            limbos.push(Limbo {
                name,
                rail,
                cause,
                kind,
                acked,
                imms,
                slices,
                asked_by: None,
                until,
            });
        }
        self.patience.insert((until, peer));
        self.ask(peer, rails, sink);
    }

    /// Asks what became of the slices of lost links, over a link that is up.
    pub(super) fn ask(&mut self, peer: PeerKey, rails: &mut Rails, sink: &dyn Sink) {
        let route = &mut self.peers[peer as usize];
        if route.state != State::Up || route.healing.limbos.is_empty() {
            return;
        }
        let heals = |l: &&Link| rails[l.pair.rail].receipts() != Receipts::None;
        let Some(via) = route.active().iter().find(heals).map(|l| (l.pair.rail, l.id)) else {
            // The transport that replaced the lost one can't ask.
            let limbos = std::mem::take(&mut route.healing.limbos);
            for l in limbos {
                self.give_up(peer, l.slices, (rails, l.rail, &l.cause), sink);
            }
            return;
        };
        for limbo in route.healing.limbos.iter_mut().filter(|l| l.asked_by.is_none()) {
            limbo.asked_by = Some(via);
            let imms = limbo.imms.iter().map(|(imm, _)| *imm).collect();
            rails[via.0].note(via.1, Note::Lost { name: limbo.name, imms }.encode());
        }
    }

    pub(super) fn on_note(
        &mut self,
        now: Time,
        (rail, link): (usize, LinkId),
        frame: &[u8],
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let Some(peer) = self.links.get(&(rail, link)).copied() else { return };
        match Note::decode(frame) {
            Ok(Note::Lost { name, imms }) if imms.len() <= MAX_IMMS => {
                self.on_question(peer, name, imms, (rail, link), rails);
            }
            Ok(Note::Ended { name, imms, tally }) => {
                let limbos = &mut self.peers[peer as usize].healing.limbos;
                let same =
                    |l: &Limbo| l.name == name && l.imms.iter().map(|(imm, _)| imm).eq(imms.iter());
                let Some(at) = limbos.iter().position(same) else { return };
                let limbo = limbos.remove(at);
                self.make_good(now, peer, limbo, tally, rails, sink);
            }
            Ok(Note::Lost { .. }) => rails[rail].disconnect(link, "it asks for too much at once"),
            Err(e) => rails[rail].disconnect(link, &e.to_string()),
        }
    }

    /// The peer has lost a link: ours must be down before it is told what came over it.
    fn on_question(
        &mut self,
        peer: PeerKey,
        name: LinkName,
        imms: Vec<u32>,
        via: (usize, LinkId),
        rails: &mut Rails,
    ) {
        let route = &mut self.peers[peer as usize];
        match route.named(name) {
            None => self.answer(peer, name, &imms, via, rails),
            // It can't have lost the link by which it asks.
            Some(same) if same == via => {
                rails[via.0].disconnect(via.1, "it asks about this very link");
            }
            Some((rail, link)) => {
                if route.healing.questions.len() < MOST_QUESTIONS {
                    route.healing.questions.push((name, imms, via));
                }
                rails[rail].disconnect(link, "the peer has lost it");
            }
        }
    }

    fn answer(
        &mut self,
        peer: PeerKey,
        name: LinkName,
        imms: &[u32],
        via: (usize, LinkId),
        rails: &mut Rails,
    ) {
        if !self.links.contains_key(&via) {
            // Whoever asked will ask again by another link.
            return;
        }
        // A link that never was up here may still come up: nothing can be promised of it.
        let tally = self.peers[peer as usize].healing.tally(name, imms).unwrap_or(Tally::Unknown);
        let imms = imms.to_vec();
        rails[via.0].note(via.1, Note::Ended { name, imms, tally }.encode());
    }

    /// The peer has told what came over a lost link.
    fn make_good(
        &mut self,
        now: Time,
        peer: PeerKey,
        limbo: Limbo,
        tally: Tally,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let Limbo { slices, kind, acked, imms, rail, cause, .. } = limbo;
        if tally == Tally::Unknown {
            // Nor has the peer promised that its end is down (MR-1).
            return self.give_up(peer, slices, (rails, rail, &cause), sink);
        }
        let (plain, mut counted): (Vec<_>, Vec<_>) =
            slices.into_iter().partition(|s| s.count().is_none());
        counted.sort_by_key(|s| s.order);
        let missing = match (tally, kind) {
            (Tally::InOrder(all), Receipts::InOrder) => {
                missing::in_order(counted, all.checked_sub(acked))
            }
            (Tally::ByImm(all), Receipts::ByImm) => missing::by_imm(counted, &imms, &all),
            _ => Err(counted),
        };
        match missing {
            Ok(missing) => {
                for (count, slices) in missing {
                    self.recover(now, peer, count, slices, rails, sink);
                }
            }
            Err(counted) => {
                self.give_up(peer, counted, (rails, rail, &cause), sink);
            }
        }
        self.return_all(now, peer, plain, rails, sink);
    }

    /// Sends slices again: their bytes only.
    fn return_all(
        &mut self,
        now: Time,
        peer: PeerKey,
        slices: Vec<Slice>,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        for slice in slices {
            let key = slice.owner;
            let transfer = &mut self.transfers[key.slot as usize];
            transfer.outstanding -= 1;
            if transfer.error.is_none() && slice.tries >= MAX_TRIES {
                let (rail, name) = (slice.link.0, transfer.name);
                let error = self.peers[peer as usize].blame(rails, rail, name, worn_out());
                self.transfers[key.slot as usize].fail(error);
            }
            let transfer = &mut self.transfers[key.slot as usize];
            if transfer.error.is_some() {
                self.settle(key, sink);
                continue;
            }
            if let Some(confirm) = slice.confirm {
                transfer.reopen(confirm);
            }
            let confirm = slice.confirm;
            self.post_again(key, BoundOp::again(slice, confirm));
        }
        self.drain_backlog(now, peer, rails, sink);
    }

    /// Ahead of what was never tried.
    fn post_again(&mut self, key: TransferKey, op: BoundOp) {
        let route = &mut self.peers[op.peer as usize];
        route.backlog.push_front((key, op));
        self.transfers[key.slot as usize].waiting += 1;
        self.backlogged += 1;
    }

    /// Sends again what some slices carried, then the counts that are missing of theirs. Which of
    /// several slices were counted may be unknown: so all of them are over at once.
    fn recover(
        &mut self,
        now: Time,
        peer: PeerKey,
        count: Count,
        slices: Vec<Slice>,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let members: Vec<TransferKey> = slices.iter().map(|s| s.owner).collect();
        let wanted = |s: &Slice| self.transfers[s.owner.slot as usize].error.is_none();
        if count.n == 0 || !slices.iter().any(wanted) {
            // All was counted, or nobody wants it any more.
            return members.into_iter().for_each(|m| self.member_over(m, Ok(()), sink));
        }
        let tries = slices.iter().map(|s| s.tries).max().unwrap_or(0);
        let key = self.open("recovery");
        let transfer = &mut self.transfers[key.slot as usize];
        (transfer.peer, transfer.members, transfer.sealed) = (peer, members, true);
        if tries >= MAX_TRIES {
            let route = &self.peers[peer as usize];
            let error = route.blame(rails, slices[0].link.0, "write", worn_out());
            self.transfers[key.slot as usize].fail(error);
            return self.settle(key, sink);
        }
        let confirm = transfer.open_confirm(peer, (None, tries + 1), Some(count));
        for slice in slices {
            if matches!(slice.wr, WorkRequest::Write { .. }) {
                self.transfers[key.slot as usize].join_confirm(confirm);
                self.post_again(key, BoundOp::again(slice, Some(confirm)));
            }
        }
        if let Some(count) = self.transfers[key.slot as usize].all_posted(confirm) {
            let op = BoundOp::new(peer, WorkRequest::Count(count)).tried(tries + 1);
            self.post_again(key, op);
        }
        self.drain_backlog(now, peer, rails, sink);
    }

    /// A slice of a transfer was made good by another, or couldn't be.
    pub(super) fn member_over(
        &mut self,
        key: TransferKey,
        result: Result<(), EngineError>,
        sink: &dyn Sink,
    ) {
        let transfer = self.transfers.get_mut(key.slot as usize);
        let Some(transfer) = transfer.filter(|t| t.serial == key.serial) else { return };
        transfer.outstanding -= 1;
        if let Err(e) = result {
            transfer.unproven = true;
            transfer.fail(e);
        }
        self.settle(key, sink);
    }

    /// What became of these slices will never be known.
    fn give_up(
        &mut self,
        peer: PeerKey,
        slices: Vec<Slice>,
        (rails, rail, cause): (&Rails, usize, &DomainError),
        sink: &dyn Sink,
    ) {
        for slice in slices {
            let key = slice.owner;
            let name = self.transfers[key.slot as usize].name;
            let error = self.peers[peer as usize].blame(rails, rail, name, cause.clone());
            self.member_over(key, Err(error), sink);
        }
    }

    /// Gives up on answers that have not come.
    pub(super) fn lose_patience(
        &mut self,
        now: Time,
        peer: PeerKey,
        rails: &Rails,
        sink: &dyn Sink,
    ) {
        let limbos = &mut self.peers[peer as usize].healing.limbos;
        let (late, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(limbos).into_iter().partition(|l| l.until <= now);
        *limbos = waiting;
        for l in late {
            let why = format!("{}; what had arrived could not be found out in time", l.cause);
            let cause = DomainError::LinkDown(why);
            self.give_up(peer, l.slices, (rails, l.rail, &cause), sink);
        }
    }
}

fn worn_out() -> DomainError {
    DomainError::LinkDown(format!("links were lost {MAX_TRIES} times in the middle of it"))
}
