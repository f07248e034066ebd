//! One peer: its links, the transports that are not tried yet, and the operations that wait.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    backlog::Backlog,
    heal::Healing,
    ledger::Slice,
    policy::{classes::ByClass, score::RailSelector},
    rail_probes::RailProbes,
    spray::Gauge,
    Policy, Rails,
};
use crate::{
    api::{EngineAddress, TransportKind, MAX_RAILS},
    domain::{Domain, DomainError, LinkId, LinkName, Receipt, Receipts},
    flight::PeerTally,
    time::Time,
    EngineError, LostLink,
};

/// Identifies a peer within its group.
pub(crate) type PeerKey = u32;
/// Reserves a peer's key while the layer above holds a clone.
pub(crate) type PeerHold = Arc<()>;

/// Immediate retries of a connection attempt that a broken link cut off.
const MAX_ATTEMPTS: u32 = 3;
/// Losses of the last link within [`REVIVAL_SPELL`], without a completed slice, after which a peer
/// is given up.
const MAX_REVIVALS: u32 = 64;
const REVIVAL_SPELL: Duration = Duration::from_secs(1);

/// Failures that are kept for `explain`.
const MAX_REASONS: usize = 16;

/// The state of the connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    Idle,
    Connecting,
    Up,
    Lost,
}

/// Whether a transport, or one NIC of it, is used towards a peer, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportVerdict {
    pub transport: TransportKind,
    /// The NIC; empty where there is none.
    pub device: String,
    pub chosen: bool,
    pub reason: String,
}

/// A local rail and an endpoint of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RailPair {
    pub rail: usize,
    pub endpoint: usize,
}

/// A link that is up.
#[derive(Debug)]
pub(super) struct ActiveLink {
    pub pair: RailPair,
    pub id: LinkId,
    pub name: LinkName,
    /// This side began the link, so it also reconnects.
    pub ours: bool,
    /// Writes with a count that the peer has acknowledged.
    pub acked: u64,
    pub gauge: Gauge,
    description: String,
    version: Option<u16>,
}

impl ActiveLink {
    /// Describes the link, for `explain`.
    fn describe(&self, rail: &dyn Domain) -> String {
        let version = self.version.map(|v| format!("wire version {v}; ")).unwrap_or_default();
        format!("{}; {version}{}", self.description, rail.describe(self.id))
    }
}

/// The route to one peer. See the module.
pub(super) struct Route {
    pub address: EngineAddress,
    held: Weak<()>,
    pub policy: Policy,
    pub state: PeerState,
    /// When it became known, was lost, or a link of it ended: the latest.
    pub since: Time,
    /// Links of the preferred transport first, in the order of rails. A pair has two links if both
    /// sides connected at once.
    links: SmallVec<[ActiveLink; 1]>,
    /// The number of links at the front that share the transport in use.
    active: usize,
    /// Index of the link for the next small work request.
    turn: usize,
    /// Selects the link for the next large work request.
    pub selector: RailSelector,
    trying: SmallVec<[(RailPair, LinkId); 1]>,
    untried: VecDeque<TransportKind>,
    pub rail_probes: RailProbes,
    /// Pairs that failed before another one was up.
    failed: SmallVec<[RailPair; 1]>,
    reasons: Vec<(Option<usize>, TransportKind, String)>,
    /// The most informative cause: another engine answered, the peer refused, or this process hit a
    /// limit.
    telling: Option<DomainError>,
    pub lost: Option<EngineError>,
    pub backlog: Backlog,
    /// Bytes under way to the peer.
    pub under_way: ByClass,
    /// Bytes that the peer permits to be under way.
    pub credit: u64,
    /// This engine has asked the peer for credit.
    pub asking: bool,
    pub healing: Healing,
    pub tally: PeerTally,
    /// The error to report unless a new link comes up; set when the last link was lost.
    pub reviving: Option<EngineError>,
    /// When the error is reported (RS-4).
    pub reviving_until: Time,
    /// A broken link cut off an attempt to connect.
    cut_off: bool,
    attempts: u32,
    /// The begin of the current spell of losses of the last link, and their number.
    revivals: (Time, u32),
}

impl Route {
    pub fn new(now: Time, address: EngineAddress, policy: Policy) -> Self {
        Self {
            address,
            held: Weak::new(),
            policy,
            state: PeerState::Idle,
            since: now,
            links: SmallVec::new(),
            active: 0,
            turn: 0,
            selector: policy.spray.selector(),
            trying: SmallVec::new(),
            untried: VecDeque::new(),
            rail_probes: RailProbes::default(),
            failed: SmallVec::new(),
            reasons: Vec::new(),
            telling: None,
            lost: None,
            backlog: Backlog::default(),
            under_way: ByClass::default(),
            credit: u64::MAX,
            asking: false,
            healing: Healing::default(),
            tally: PeerTally::default(),
            reviving: None,
            reviving_until: Time::NEVER,
            cut_off: false,
            attempts: 0,
            revivals: (Time(0), 0),
        }
    }

    /// Returns the reservation of this peer's key, and makes it if there is none.
    pub fn hold(&mut self) -> PeerHold {
        self.held.upgrade().unwrap_or_else(|| {
            let hold = PeerHold::default();
            self.held = Arc::downgrade(&hold);
            hold
        })
    }

    /// Keeps the receipt of a link that has ended here. The peer may ask for it.
    pub fn keep_receipt(&mut self, now: Time, name: LinkName, receipt: Receipt) {
        self.since = now;
        self.healing.keep_receipt(name, receipt);
    }

    /// Whether no caller and no state refers to the peer, and none of its links has ended here
    /// within `rest`.
    pub fn may_be_forgotten(&self, now: Time, rest: Duration) -> bool {
        matches!(self.state, PeerState::Idle | PeerState::Lost)
            && self.held.strong_count() == 0
            && self.links.is_empty()
            && self.trying.is_empty()
            && self.backlog.is_empty()
            && self.under_way.total() == 0
            && self.healing.is_idle()
            && (self.healing.is_unmet() || now >= self.since.after(rest))
    }

    /// The links to post on, best rail first. Not empty while `Up`.
    #[inline]
    pub fn active(&self) -> &[ActiveLink] {
        &self.links[..self.active]
    }

    /// Index of the active link that gets the next work request first.
    #[inline]
    pub fn next_link(&mut self) -> usize {
        if self.turn >= self.active {
            self.turn = 0;
        }
        let turn = self.turn;
        self.turn += 1;
        turn
    }

    /// Begins to connect: tries every transport that fits the peer, in order of preference.
    pub fn begin(&mut self, rails: &Rails) {
        self.attempts = 0;
        self.start_over(rails);
    }

    /// Tries all transports again if a broken link cut off an attempt; false if it may not.
    pub fn try_again(&mut self, rails: &Rails) -> bool {
        let again = self.cut_off && self.attempts < MAX_ATTEMPTS;
        if again {
            self.attempts += 1;
            self.start_over(rails);
        }
        again
    }

    fn start_over(&mut self, rails: &Rails) {
        self.state = PeerState::Connecting;
        self.cut_off = false;
        self.reasons.clear();
        self.untried.clear();
        self.rail_probes.clear();
        self.failed.clear();
        self.telling = None;
        for kind in kinds(rails) {
            match self.unfit(kind, rails) {
                None => self.untried.push_back(kind),
                Some(reason) => self.reasons.push((None, kind, reason)),
            }
        }
    }

    /// Why a transport is not tried; `None` if it is.
    fn unfit(&self, kind: TransportKind, rails: &Rails) -> Option<String> {
        let mut loopbacks = rails.iter().filter(|r| r.kind().is_loopback());
        if !kind.is_loopback() && loopbacks.any(|r| r.unfit(&self.address).is_none()) {
            return Some("the peer is this engine itself, which needs no link".into());
        }
        let theirs = |k| self.address.endpoints_of(k).next().is_some();
        if !theirs(kind) {
            let offers = self.address.endpoints.iter().map(|e| e.transport);
            let mut offers: Vec<_> =
                offers.filter(|k| !k.is_loopback()).map(TransportKind::name).collect();
            offers.dedup();
            let mismatch = match kind.has_nics() && self.address.has_nics() {
                true => "; the two don't speak to each other: give both sides the same one",
                false => "",
            };
            return Some(format!("the peer offers {}, not {kind}{mismatch}", offers.join(", ")));
        }
        if kind.is_fallback() && !self.policy.names_fallback {
            // RS-2: if both sides have NICs, a transfer over sockets would be a silent slow path.
            let ours = kinds(rails).into_iter().find(|k| k.has_nics());
            if let Some(ours) = ours.filter(|_| self.address.has_nics()) {
                return Some(format!(
                    "both sides have RDMA NICs ({ours} here), so {kind} is used only when asked \
                     for: name it among the allowed transports"
                ));
            }
        }
        let mut of_kind = rails.iter().filter(|r| r.kind() == kind);
        // One fitting rail is enough; others report their cause when they are tried.
        let mut why = None;
        let fit = of_kind.any(|r| match r.unfit(&self.address) {
            None => true,
            Some(reason) => {
                why.get_or_insert(reason);
                false
            }
        });
        match fit {
            true => None,
            false => why,
        }
    }

    /// The pairs of local rails and peer endpoints of the next transport to try. The side with
    /// fewer NICs uses some more than once, so that all NICs carry bytes.
    pub fn next_pairs(&mut self, rails: &Rails) -> Option<SmallVec<[RailPair; MAX_RAILS]>> {
        let kind = self.untried.pop_front()?;
        let ours: SmallVec<[usize; MAX_RAILS]> =
            (0..rails.len()).filter(|i| rails[*i].kind() == kind).take(MAX_RAILS).collect();
        let theirs: SmallVec<[usize; MAX_RAILS]> =
            self.address.endpoints_of(kind).take(MAX_RAILS).collect();
        let n = ours.len().max(theirs.len());
        let pair = |i| RailPair { rail: ours[i % ours.len()], endpoint: theirs[i % theirs.len()] };
        Some((0..n).map(pair).collect())
    }

    pub fn is_trying(&self) -> bool {
        !self.trying.is_empty()
    }

    pub fn try_pair(&mut self, pair: RailPair, link: LinkId) {
        self.trying.push((pair, link));
    }

    /// Takes all attempts under way, to end them.
    pub fn take_attempts(&mut self) -> SmallVec<[(RailPair, LinkId); 1]> {
        std::mem::take(&mut self.trying)
    }

    /// Ends an attempt and returns its pair; `None` if the link was no attempt.
    pub fn tried(&mut self, rail: usize, link: LinkId) -> Option<RailPair> {
        let at = self.trying.iter().position(|(p, l)| (p.rail, *l) == (rail, link))?;
        Some(self.trying.swap_remove(at).0)
    }

    /// Records that a pair could not connect.
    pub fn failed(&mut self, rails: &Rails, pair: RailPair, cause: DomainError) {
        if self.reasons.len() >= MAX_REASONS {
            self.reasons.remove(0);
        }
        self.reasons.push((Some(pair.rail), rails[pair.rail].kind(), cause.to_string()));
        if self.state == PeerState::Connecting {
            self.failed.push(pair);
        }
        self.cut_off |= matches!(cause, DomainError::LinkDown(_));
        let telling = match &cause {
            DomainError::Stale(_) | DomainError::Handshake(_) => true,
            DomainError::Io { errno, .. } => EngineError::is_limit(*errno),
            _ => false,
        };
        if telling {
            self.telling = Some(cause);
        }
    }

    pub fn up(
        &mut self,
        now: Time,
        pair: RailPair,
        (id, name): (LinkId, LinkName),
        (description, version): (String, Option<u16>),
        rails: &Rails,
    ) {
        let ours = self.tried(pair.rail, id).is_some();
        self.rail_probes.on_up(now, pair);
        let gauge = Gauge::new(now);
        self.links.push(ActiveLink { pair, id, name, ours, acked: 0, gauge, description, version });
        self.links.sort_by_key(|l| (l.pair.rail, l.pair.endpoint));
        self.count_active(rails);
        self.state = PeerState::Up;
        self.lost = None;
        self.reviving = None;
    }

    /// Whether to reconnect after the last link was lost: not if links are lost repeatedly.
    pub fn may_revive(&mut self, now: Time) -> bool {
        let (since, n) = self.revivals;
        self.revivals = match now.since(since) < REVIVAL_SPELL {
            true => (since, n + 1),
            false => (now, 1),
        };
        self.revivals.1 <= MAX_REVIVALS
    }

    fn count_active(&mut self, rails: &Rails) {
        let best = self.links.first().map(|l| rails[l.pair.rail].kind());
        let same = |l: &&ActiveLink| Some(rails[l.pair.rail].kind()) == best;
        self.active = self.links.iter().take_while(same).count();
    }

    /// Removes a link that is down.
    pub fn down(&mut self, rail: usize, id: LinkId, rails: &Rails) -> Option<ActiveLink> {
        let at = self.links.iter().position(|l| (l.pair.rail, l.id) == (rail, id))?;
        let link = self.links.remove(at);
        self.count_active(rails);
        Some(link)
    }

    /// Records the end of a slice. If it is done, its count has arrived.
    #[inline]
    pub fn ended(&mut self, now: Time, slice: &Slice, done: bool) {
        if done {
            self.revivals.1 = 0;
        }
        let (rail, id) = slice.link;
        *self.under_way.of_mut(slice.priority) -= slice.bytes;
        self.backlog.try_again();
        let link = self.links.iter_mut().find(|l| (l.pair.rail, l.id) == (rail, id));
        let Some(link) = link else { return };
        link.gauge.left(now, slice.bytes);
        if !done {
            return;
        }
        link.gauge.done(now, slice);
        if let Some(count) = slice.count() {
            link.acked += u64::from(count.n);
        }
    }

    /// The predicted time for `bytes`, after what is under way.
    pub fn expects(&self, now: Time, bytes: u64) -> Duration {
        let n = self.active().len().max(1) as u64;
        let all = self.active().iter().map(|l| l.gauge.expects(now, bytes / n));
        all.min().unwrap_or(Duration::ZERO)
    }

    /// The links to post on, and the selector among them.
    pub fn links_and_selector(&mut self) -> (&mut [ActiveLink], &mut RailSelector) {
        (&mut self.links[..self.active], &mut self.selector)
    }

    /// The rail and id of the link with this name.
    pub fn named(&self, name: LinkName) -> Option<(usize, LinkId)> {
        let link = self.links.iter().find(|l| l.name == name)?;
        Some((link.pair.rail, link.id))
    }

    /// Whether the peer is up and a new link over this pair would be used.
    pub fn would_use(&self, pair: RailPair, rails: &Rails) -> bool {
        let Some(best) = self.links.first() else { return false };
        rails[best.pair.rail].kind() == rails[pair.rail].kind()
            && self.links.iter().all(|l| l.pair != pair)
    }

    /// Takes the pairs that failed before another of their transport was up, to probe them.
    pub fn take_failed(&mut self, rails: &Rails) -> SmallVec<[RailPair; 1]> {
        let mut failed = std::mem::take(&mut self.failed);
        failed.retain(|p| self.would_use(*p, rails));
        failed
    }

    /// The engine's error for a domain's error about this peer.
    pub fn blame(
        &self,
        rails: &Rails,
        rail: usize,
        op: &'static str,
        e: DomainError,
    ) -> EngineError {
        let peer = self.address.label();
        let rail_of = rail;
        let rail = &rails[rail];
        // If links heal, only a new connection attempt shows whether the peer is lost.
        let heals =
            self.policy.receipts(&**rail) != Receipts::None && !matches!(e, DomainError::Gone(_));
        let last = self.state == PeerState::Lost
            || (!heals && self.active().iter().all(|l| l.pair.rail == rail_of));
        let lost = |cause: String, errno| {
            let (transport, nic) = (rail.kind().to_string(), rail.device().to_owned());
            let peer = peer.clone();
            let incarnation = Some(self.address.id.to_hex());
            let link = Box::new(LostLink { errno, rail: u8::try_from(rail_of).ok(), incarnation });
            match last {
                true => EngineError::PeerLost { peer, transport, nic, cause, link },
                false => EngineError::RailLost { peer, transport, nic, cause, link },
            }
        };
        match e {
            DomainError::LinkDown(cause) | DomainError::Gone(cause) => lost(cause, None),
            DomainError::Io { call, errno } => lost(format!("{call}: {errno}"), Some(errno)),
            DomainError::Stale(cause) => EngineError::Stale {
                what: format!("the region of {peer} named by the {op}"),
                cause,
                remedy: "fetch a fresh descriptor from its owner",
            },
            DomainError::Refused(cause) => EngineError::Refused { peer, op, cause },
            DomainError::Handshake(cause) => EngineError::Handshake { peer, cause },
            DomainError::Unavailable(reasons) | DomainError::Ports(reasons) => {
                EngineError::Unreachable { peer, reasons }
            }
            DomainError::Storage(cause) => EngineError::Storage { peer, op, cause },
        }
    }

    /// The error after all transports have failed.
    pub fn unreachable(&self, rails: &Rails) -> EngineError {
        let peer = self.address.label();
        // The loopback's reason is left out if there are other transports.
        let elsewhere = self.reasons.iter().any(|(_, kind, _)| !kind.is_loopback());
        let telling = self.reasons.iter().filter(|(_, kind, _)| !(elsewhere && kind.is_loopback()));
        let texts = telling.map(|(rail, kind, why)| match rail.map_or("", |r| rails[r].device()) {
            "" => format!("{kind}: {why}"),
            device => format!("{kind} {device}: {why}"),
        });
        let reasons = match self.reasons.is_empty() {
            true => "none of its transports is allowed here".to_owned(),
            false => texts.collect::<Vec<_>>().join("; "),
        };
        match self.telling {
            Some(DomainError::Stale(_)) => EngineError::Stale {
                what: format!("the address of {peer}"),
                cause: reasons,
                remedy: "fetch its new address",
            },
            Some(DomainError::Handshake(_)) => EngineError::Handshake { peer, cause: reasons },
            Some(DomainError::Io { call, errno }) => EngineError::resource(call, errno),
            _ => EngineError::Unreachable { peer, reasons },
        }
    }

    pub fn explain(&self, rails: &Rails) -> (Option<String>, Vec<TransportVerdict>) {
        let used = self.active().first().map(|l| rails[l.pair.rail].kind());
        let verdicts = rails.iter().enumerate().map(|(i, rail)| {
            let transport = rail.kind();
            let device = rail.device().to_owned();
            let here: Vec<_> = self.active().iter().filter(|l| l.pair.rail == i).collect();
            if !here.is_empty() {
                let texts = here.iter().map(|l| l.describe(&**rail));
                let reason = texts.collect::<Vec<_>>().join("; and ");
                return TransportVerdict { transport, device, chosen: true, reason };
            }
            let of_rail = |r: &&(Option<usize>, TransportKind, String)| match r.0 {
                Some(at) => at == i,
                None => r.1 == transport,
            };
            let reason = match self.reasons.iter().rfind(of_rail) {
                Some((.., reason)) => reason.clone(),
                None => match self.unfit(transport, rails) {
                    Some(reason) => reason,
                    None if used.is_some() => "not needed: a preferred one works".into(),
                    None => "not tried yet".into(),
                },
            };
            TransportVerdict { transport, device, chosen: false, reason }
        });
        (used.map(|k| k.to_string()), verdicts.collect())
    }
}

/// The kinds of the group's rails, in order of preference.
fn kinds(rails: &Rails) -> SmallVec<[TransportKind; 4]> {
    let mut kinds = SmallVec::new();
    for rail in rails.iter() {
        if !kinds.contains(&rail.kind()) {
            kinds.push(rail.kind());
        }
    }
    kinds
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::api::EngineId;

    #[test]
    fn ic_4_what_came_over_a_link_is_remembered_from_the_end_of_the_link_on() {
        let address = EngineAddress { id: EngineId([1; 16]), name: "b".into(), endpoints: vec![] };
        let mut route = Route::new(Time(0), address, Policy::default());
        let rest = Duration::from_secs(1);
        assert!(route.may_be_forgotten(Time(0), rest), "it was never met");
        let ended = Time(0).after(10 * rest);
        route.keep_receipt(ended, LinkName::default(), Receipt::InOrder(1));
        assert!(!route.may_be_forgotten(ended.after(rest / 2), rest));
        assert!(route.may_be_forgotten(ended.after(rest), rest));
    }
}
