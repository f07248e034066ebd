//! Chooses, among a peer's links that may carry a work request now, the one that does.

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    ledger::{Ledger, Slice},
    policy::{
        admit::{admit, Admission, AdmissionRequest, Window},
        score::Load,
        size::{GRAIN, SMALLEST},
    },
    route::Route,
    slices::BoundOp,
    spray,
    transfer::{Transfer, TransferKey},
    PeerKey, Rails,
};
use crate::{
    api::Priority,
    domain::{Caps, DomainError, Post, Receipts, WorkRequest},
    time::Time,
};

/// Slices of an operation that may be under way on one rail, whatever their size.
pub(super) const SLICES: u64 = 4;

/// The links of a peer that an operation may use.
pub(super) struct EligibleLinks<'a> {
    now: Time,
    pub route: &'a mut Route,
    rails: &'a mut Rails,
    ledger: &'a mut Ledger,
    peer: PeerKey,
    tries: u8,
    /// Index of the only eligible link among the active ones, if there is only one.
    only: Option<usize>,
    priority: Priority,
    deadline: Time,
    /// When the operation became the first of its queue.
    since: Time,
    /// Why a slice has to wait, if one does.
    pub deferral: Deferral,
}

/// Why a slice was not posted, and until when it waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deferral {
    /// Bytes that found no room in the windows; 0 if it waits for another reason.
    pub bytes: u64,
    /// When to try again if nothing happens before.
    pub until: Time,
}

impl<'a> EligibleLinks<'a> {
    #[inline]
    pub fn new(
        (now, since): (Time, Time),
        route: &'a mut Route,
        (rails, ledger): (&'a mut Rails, &'a mut Ledger),
        op: &BoundOp,
        transfer: &Transfer,
    ) -> Result<Self, (usize, DomainError)> {
        let only = match (op.pin, &op.wr) {
            (Some(pin), _) => Some(pinned(route, rails, pin)?),
            // Messages use one link, so that most of them arrive in order.
            (None, WorkRequest::Send(_)) => Some(0),
            (None, _) if route.active().len() == 1 => Some(0),
            (None, _) => None,
        };
        let (peer, tries) = (op.peer, op.tries);
        let deferral = Deferral { bytes: 0, until: Time::NEVER };
        let (priority, deadline, since) = (transfer.priority, transfer.deadline, since.min(now));
        Ok(Self {
            now,
            route,
            rails,
            ledger,
            peer,
            tries,
            only,
            priority,
            deadline,
            since,
            deferral,
        })
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.only.map_or(self.route.active().len(), |_| 1)
    }

    /// The capabilities that all eligible links have.
    #[inline]
    pub fn caps(&self) -> Caps {
        let links = self.route.active();
        if let Some(only) = self.only {
            return self.rails[links[only].pair.rail].caps();
        }
        let all = links.iter().map(|l| self.rails[l.pair.rail].caps());
        all.reduce(|a, b| Caps {
            max_bytes: a.max_bytes.min(b.max_bytes),
            max_pages: a.max_pages.min(b.max_pages),
            max_message: a.max_message.min(b.max_message),
        })
        .unwrap_or(Caps { max_bytes: 0, max_pages: 0, max_message: 0 })
    }

    /// The largest slice, bytes: several fit into the narrowest window. `None` without windows.
    pub fn max_slice(&self) -> Option<u64> {
        let links = self.route.active();
        let links = self.only.map_or(links, |only| &links[only..=only]);
        if !links.iter().all(|l| self.is_known(l.pair.rail)) {
            return None;
        }
        let narrowest = links.iter().map(|l| self.ledger.window(l.pair.rail)).min();
        let narrowest = narrowest.unwrap_or(u64::MAX).min(self.route.credit);
        Some((narrowest / SLICES / GRAIN * GRAIN).max(SMALLEST))
    }

    #[inline]
    fn is_known(&self, rail: usize) -> bool {
        self.route.keeps_work(&*self.rails[rail])
    }

    /// Posts a work request on one link: small work on the next link with room, large work on the
    /// link that the policy selects. `behind`: bytes of the same operation after this request.
    #[inline]
    pub fn post(
        &mut self,
        key: TransferKey,
        transfer: &mut Transfer,
        (wr, behind): (&WorkRequest, u64),
        confirm: Option<u32>,
    ) -> Result<Post, (usize, DomainError)> {
        let bytes = wr.bytes();
        let n = self.route.active().len();
        let mut attempt = PostAttempt::new(n, self.priority);
        if bytes > 0 {
            for at in 0..n {
                match self.admits(at, bytes, transfer.unposted) {
                    Some(class) => attempt.class[at] = class,
                    None => (attempt.full[at], attempt.waits) = (true, true),
                }
            }
        }
        if let Some(only) = self.only {
            if attempt.full[only] {
                return Ok(Post::Full);
            }
            if let Some(post) =
                self.post_on(only, key, transfer, (wr, bytes), confirm, &mut attempt)?
            {
                return Ok(post);
            }
            return attempt.end();
        }
        if bytes < SMALLEST {
            let first = self.route.next_link();
            for i in 0..n {
                let at = (first + i) % n;
                if attempt.full[at] {
                    continue;
                }
                if let Some(post) =
                    self.post_on(at, key, transfer, (wr, bytes), confirm, &mut attempt)?
                {
                    return Ok(post);
                }
            }
            return attempt.end();
        }
        loop {
            let (links, selector) = self.route.links_and_selector();
            let views = spray::views(self.now, links, self.ledger, &attempt.full, bytes);
            let Some(at) = selector.pick(&views, Load { length: bytes, behind }) else {
                // A link that lacks only room can carry it later.
                let mut those = views.iter().zip(&attempt.full);
                attempt.waits |= those.any(|(view, full)| !full && !view.room);
                return attempt.end();
            };
            if let Some(post) =
                self.post_on(at, key, transfer, (wr, bytes), confirm, &mut attempt)?
            {
                return Ok(post);
            }
        }
    }

    /// The class with which a link admits `bytes` now; `None` if the rail's window or the
    /// receiver's credit has no room.
    #[inline]
    fn admits(&mut self, at: usize, bytes: u64, unposted: u64) -> Option<Priority> {
        let link = &self.route.active()[at];
        let rail = self.ledger.rail_window(link.pair.rail, bytes);
        let receiver = Window { bytes: self.route.credit, under_way: self.route.under_way };
        if rail.has_room(self.priority, bytes) && receiver.has_room(self.priority, bytes) {
            return Some(self.priority);
        }
        let remaining = match self.deadline {
            // It never becomes urgent.
            Time::NEVER => Duration::MAX,
            _ => self.route.expects(self.now, unposted),
        };
        let (class, since, deadline) = (self.priority, self.since, self.deadline);
        match admit(
            self.now,
            AdmissionRequest { class, bytes, since, deadline, remaining },
            rail,
            receiver,
        ) {
            Admission::Post(class) => Some(class),
            Admission::Wait(at) => {
                self.deferral = Deferral { bytes, until: self.deferral.until.min(at) };
                None
            }
            // Its deadline expires next.
            Admission::Expired => None,
        }
    }

    /// Posts on one link; `None` if the link has no room or fails.
    #[inline]
    fn post_on(
        &mut self,
        at: usize,
        key: TransferKey,
        transfer: &mut Transfer,
        (wr, bytes): (&WorkRequest, u64),
        confirm: Option<u32>,
        attempt: &mut PostAttempt,
    ) -> Result<Option<Post>, (usize, DomainError)> {
        let policy = self.route.policy;
        let known = self.is_known(self.route.active()[at].pair.rail);
        let (links, _) = self.route.links_and_selector();
        let link = &mut links[at];
        let rail = link.pair.rail;
        let domain = &mut self.rails[rail];
        let heals = policy.receipts(&**domain) != Receipts::None;
        let token = match known {
            false => Transfer::token(key, confirm),
            true => self.ledger.enter(Slice {
                owner: key,
                peer: self.peer,
                link: (rail, link.id),
                wr: wr.clone(),
                confirm,
                tries: self.tries,
                posted: self.now,
                priority: attempt.class[at],
                bytes,
                queued: link.gauge.queued,
                number: None,
                order: 0,
            }),
        };
        let posted = domain.post(link.id, token, wr);
        if known && posted != Ok(Post::Queued) {
            self.ledger.take(token);
        }
        match posted {
            Ok(Post::Full) => (attempt.full[at], attempt.waits) = (true, true),
            Ok(post) => {
                if known && post == Post::Queued {
                    link.gauge.posted(self.now, bytes);
                    *self.route.under_way.of_mut(attempt.class[at]) += bytes;
                }
                self.route.tally.posted(rail, transfer.priority, (1, bytes), self.tries > 0);
                let pending = post == Post::Queued;
                transfer.slice_posted((self.now, rail), (bytes, self.tries), confirm, pending);
                return Ok(Some(post));
            }
            // Nothing was posted: another link may carry it, or the link that replaces this one.
            Err(e) if e.is_loss() => {
                attempt.full[at] = true;
                match heals {
                    true => attempt.waits = true,
                    false => attempt.failed = Some((rail, e)),
                }
            }
            Err(e) => return Err((rail, e)),
        }
        Ok(None)
    }
}

/// The links that did not accept a work request.
struct PostAttempt {
    full: SmallVec<[bool; spray::MAX_LINKS]>,
    /// The class under which each link would carry it.
    class: SmallVec<[Priority; spray::MAX_LINKS]>,
    /// A link may accept it later.
    waits: bool,
    failed: Option<(usize, DomainError)>,
}

impl PostAttempt {
    #[inline]
    fn new(links: usize, class: Priority) -> Self {
        Self {
            full: SmallVec::from_elem(false, links),
            class: SmallVec::from_elem(class, links),
            waits: false,
            failed: None,
        }
    }

    /// The result if no link accepted it: it waits, or fails if no link will.
    fn end(self) -> Result<Post, (usize, DomainError)> {
        match self.failed.filter(|_| !self.waits) {
            Some(failed) => Err(failed),
            None => Ok(Post::Full),
        }
    }
}

/// The active link over the pinned rail.
fn pinned(route: &Route, rails: &Rails, pin: u8) -> Result<usize, (usize, DomainError)> {
    let links = route.active();
    let kind = rails[links[0].pair.rail].kind();
    let rail = (0..rails.len()).filter(|r| rails[*r].kind() == kind).nth(pin.into());
    let at = rail.and_then(|rail| links.iter().position(|l| l.pair.rail == rail));
    at.ok_or_else(|| match rail {
        // Other links may not know yet that the peer is lost.
        Some(rail) => {
            let why = format!("rail {pin}, to which it is pinned, does not reach this peer now");
            (rail, DomainError::LinkDown(why))
        }
        None => {
            let n = rails.iter().filter(|r| r.kind() == kind).count();
            let why = format!("it is pinned to rail {pin}, but {kind} has {n} here");
            (links[0].pair.rail, DomainError::Unavailable(why))
        }
    })
}
