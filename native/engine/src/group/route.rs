//! One peer: its links, the attempts to connect to it, and the operations that wait.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    attempts::{unfit, ConnectAttempts, RailPair},
    backlog::Backlog,
    heal::Healing,
    ledger::Slice,
    policy::{classes::ByClass, score::RailSelector, size::SMALLEST},
    rail_probes::RailProbes,
    spray::Gauge,
    Policy, Rails,
};
use crate::{
    api::{EngineAddress, TransportKind},
    domain::{Caps, Domain, DomainError, LinkId, LinkName, Receipt, Receipts, WorkRequest},
    flight::PeerTally,
    time::Time,
    EngineError, LostLink,
};

/// Identifies a peer within its group.
pub(crate) type PeerKey = u32;
/// Reserves a peer's key while the layer above holds a clone.
pub(crate) type PeerHold = Arc<()>;

/// Losses of the last link within [`REVIVAL_SPELL`], without a completed slice, after which a peer
/// is given up.
const MAX_REVIVALS: u32 = 64;
const REVIVAL_SPELL: Duration = Duration::from_secs(1);

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

/// The only active link to a peer: a post on it chooses no link.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirectLink {
    pub rail: usize,
    pub id: LinkId,
    /// Whether the ledger keeps its work. If not, no window delays a post.
    pub keeps_work: bool,
    /// Whether lost work is sent again.
    pub heals: bool,
    caps: Caps,
}

impl DirectLink {
    /// Whether the link carries a work request without a cut. Windows cut long ones.
    #[inline]
    pub fn takes(&self, wr: &WorkRequest) -> bool {
        match wr {
            WorkRequest::Write { data, .. }
            | WorkRequest::Read { data }
            | WorkRequest::Prepare { data } => {
                let is_short = !self.keeps_work || data.bytes() < SMALLEST;
                is_short
                    && data.page_len <= self.caps.max_bytes
                    && data.pages <= self.caps.max_pages
            }
            WorkRequest::Count(_) | WorkRequest::Send(_) => true,
        }
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
    /// The only active link, if there is one.
    pub direct: Option<DirectLink>,
    /// Index of the link for the next small work request.
    turn: usize,
    /// Selects the link for the next large work request.
    pub selector: RailSelector,
    pub attempts: ConnectAttempts,
    pub rail_probes: RailProbes,
    pub lost: Option<EngineError>,
    pub backlog: Backlog,
    /// Bytes under way to the peer.
    pub under_way: ByClass,
    /// Bytes that the peer permits to be under way.
    pub credit: u64,
    /// When credit is requested again; never if none is wanted.
    pub ask_at: Time,
    pub healing: Healing,
    pub tally: PeerTally,
    /// The error to report unless a new link comes up; set when the last link was lost.
    pub reviving: Option<EngineError>,
    /// When the error is reported (RS-4).
    pub reviving_until: Time,
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
            direct: None,
            turn: 0,
            selector: policy.spray.selector(),
            attempts: ConnectAttempts::default(),
            rail_probes: RailProbes::default(),
            lost: None,
            backlog: Backlog::default(),
            under_way: ByClass::default(),
            credit: u64::MAX,
            ask_at: Time::NEVER,
            healing: Healing::default(),
            tally: PeerTally::default(),
            reviving: None,
            reviving_until: Time::NEVER,
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
            && !self.attempts.is_trying()
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
        self.state = PeerState::Connecting;
        self.rail_probes.clear();
        self.attempts.begin(&self.address, self.policy, rails);
    }

    /// The error after all attempts have failed.
    pub fn unreachable(&mut self, rails: &Rails) -> EngineError {
        self.reviving.take().unwrap_or_else(|| self.attempts.unreachable(&self.address, rails))
    }

    pub fn up(
        &mut self,
        now: Time,
        pair: RailPair,
        (id, name): (LinkId, LinkName),
        (description, version): (String, Option<u16>),
        rails: &Rails,
    ) {
        let ours = self.attempts.tried(pair.rail, id).is_some();
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
        self.direct = match self.active() {
            [link] => {
                let rail = link.pair.rail;
                let domain = &*rails[rail];
                let (keeps_work, caps) = (self.keeps_work(domain), domain.caps());
                let heals = self.policy.receipts(domain) != Receipts::None;
                Some(DirectLink { rail, id: link.id, keeps_work, heals, caps })
            }
            _ => None,
        };
    }

    /// Whether the ledger keeps work of a rail until it is over, to send it again and to count it
    /// as under way.
    #[inline]
    pub fn keeps_work(&self, rail: &dyn Domain) -> bool {
        let heals = self.policy.receipts(rail) != Receipts::None;
        let queues = rail.kind().has_nics() || rail.kind().is_loopback();
        heals || self.active().len() > 1 || (self.policy.heal && queues)
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
        let mut failed = self.attempts.take_failed();
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
            let reason = match self.attempts.reason(i, transport) {
                Some(reason) => reason.to_owned(),
                None => match unfit(transport, &self.address, self.policy, rails) {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        api::{EngineConfig, EngineId, TransportKind},
        transport::{shm::ShmDomain, tcp::TcpDomain},
        wake::Waker,
    };

    #[test]
    fn the_direct_link_is_the_only_one_of_the_transport_in_use() {
        let id = EngineId(std::array::from_fn(|_| fastrand::u8(..)));
        let config = EngineConfig::default();
        let shm = ShmDomain::open(TransportKind::Shm, id, &config, &Waker::default()).unwrap();
        let tcp = TcpDomain::open(id, &config).unwrap();
        let rails: Vec<Box<dyn Domain>> = vec![Box::new(shm), Box::new(tcp)];
        let address = EngineAddress { id: EngineId([1; 16]), name: "b".into(), endpoints: vec![] };
        let mut route = Route::new(Time(0), address, Policy::default());
        let up = |route: &mut Route, rail, id| {
            let (pair, link) = (RailPair { rail, endpoint: 0 }, (id, LinkName::default()));
            route.up(Time(0), pair, link, (String::new(), None), &rails);
            route.direct.map(|link| link.id)
        };
        let down = |route: &mut Route, rail, id| {
            route.down(rail, id, &rails).unwrap();
            route.direct.map(|link| link.id)
        };
        assert_eq!(up(&mut route, 1, 5), Some(5));
        assert_eq!(up(&mut route, 0, 7), Some(7), "shm is preferred");
        assert_eq!(up(&mut route, 0, 8), None);
        assert_eq!(down(&mut route, 0, 7), Some(8));
        assert_eq!(down(&mut route, 0, 8), Some(5));
        assert_eq!(down(&mut route, 1, 5), None);
    }

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
