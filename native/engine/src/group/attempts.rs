//! Attempts to connect to one peer: which transports and rails are tried, and why others are not.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::{Policy, Rails};
use crate::{
    api::{EngineAddress, TransportKind, MAX_RAILS},
    domain::{DomainError, LinkId},
    EngineError,
};

/// Immediate retries of a connection attempt that a broken link cut off.
const MAX_RETRIES: u32 = 3;

/// Failures that are kept for `explain`.
const MAX_REASONS: usize = 16;

/// A local rail and an endpoint of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RailPair {
    pub rail: usize,
    pub endpoint: usize,
}

/// Why a transport, or one rail of it, is not used.
struct Reason {
    rail: Option<usize>,
    transport: TransportKind,
    text: String,
}

/// The attempts to connect to one peer, since it was last looked for.
#[derive(Default)]
pub(super) struct ConnectAttempts {
    trying: SmallVec<[(RailPair, LinkId); 1]>,
    untried: VecDeque<TransportKind>,
    /// Pairs that failed before another one was up.
    failed: SmallVec<[RailPair; 1]>,
    reasons: Vec<Reason>,
    /// The most informative cause: another engine answered, the peer refused, or this process hit a
    /// limit.
    telling: Option<DomainError>,
    /// A broken link cut off an attempt to connect.
    cut_off: bool,
    retries: u32,
}

impl ConnectAttempts {
    /// Begins anew: all transports that fit the peer are to be tried, in order of preference.
    /// Attempts under way go on.
    pub fn begin(&mut self, peer: &EngineAddress, policy: Policy, rails: &Rails) {
        let mut untried = VecDeque::new();
        let mut reasons = Vec::new();
        for transport in kinds(rails) {
            match unfit(transport, peer, policy, rails) {
                None => untried.push_back(transport),
                Some(text) => reasons.push(Reason { rail: None, transport, text }),
            }
        }
        let trying = std::mem::take(&mut self.trying);
        *self = Self { trying, untried, reasons, ..Self::default() };
    }

    /// Begins again if a broken link cut off an attempt; false if it may not.
    pub fn try_again(&mut self, peer: &EngineAddress, policy: Policy, rails: &Rails) -> bool {
        let retries = self.retries;
        let again = self.cut_off && retries < MAX_RETRIES;
        if again {
            self.begin(peer, policy, rails);
            self.retries = retries + 1;
        }
        again
    }

    /// The pairs of local rails and peer endpoints of the next transport to try. The side with
    /// fewer NICs uses some more than once, so that all NICs carry bytes.
    pub fn next_pairs(
        &mut self,
        peer: &EngineAddress,
        rails: &Rails,
    ) -> Option<SmallVec<[RailPair; MAX_RAILS]>> {
        let kind = self.untried.pop_front()?;
        let ours: SmallVec<[usize; MAX_RAILS]> =
            (0..rails.len()).filter(|i| rails[*i].kind() == kind).take(MAX_RAILS).collect();
        let theirs: SmallVec<[usize; MAX_RAILS]> =
            peer.endpoints_of(kind).take(MAX_RAILS).collect();
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
    pub fn take_trying(&mut self) -> SmallVec<[(RailPair, LinkId); 1]> {
        std::mem::take(&mut self.trying)
    }

    /// Ends an attempt and returns its pair; `None` if the link was no attempt.
    pub fn tried(&mut self, rail: usize, link: LinkId) -> Option<RailPair> {
        let at = self.trying.iter().position(|(p, l)| (p.rail, *l) == (rail, link))?;
        Some(self.trying.swap_remove(at).0)
    }

    /// Records that a pair failed before another one was up.
    pub fn failed(&mut self, rails: &Rails, pair: RailPair, cause: DomainError) {
        self.failed.push(pair);
        self.refused(rails, pair.rail, cause);
    }

    /// Takes the pairs that failed before another one was up.
    pub fn take_failed(&mut self) -> SmallVec<[RailPair; 1]> {
        std::mem::take(&mut self.failed)
    }

    /// Records why a rail does not reach the peer.
    pub fn refused(&mut self, rails: &Rails, rail: usize, cause: DomainError) {
        if self.reasons.len() >= MAX_REASONS {
            self.reasons.remove(0);
        }
        let transport = rails[rail].kind();
        self.reasons.push(Reason { rail: Some(rail), transport, text: cause.to_string() });
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

    /// The last reason not to use a rail; of its transport, if it was not tried.
    pub fn reason(&self, rail: usize, transport: TransportKind) -> Option<&str> {
        let of_rail = |r: &&Reason| match r.rail {
            Some(at) => at == rail,
            None => r.transport == transport,
        };
        self.reasons.iter().rfind(of_rail).map(|r| r.text.as_str())
    }

    /// The error after all transports to `peer` have failed.
    pub fn unreachable(&self, peer: &EngineAddress, rails: &Rails) -> EngineError {
        let peer = peer.label();
        // The loopback's reason is left out if there are other transports.
        let elsewhere = self.reasons.iter().any(|r| !r.transport.is_loopback());
        let reasons = self.reasons.iter().filter(|r| !(elsewhere && r.transport.is_loopback()));
        let texts = reasons.map(|r| match r.rail.map_or("", |i| rails[i].device()) {
            "" => format!("{}: {}", r.transport, r.text),
            device => format!("{} {device}: {}", r.transport, r.text),
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

/// Why a transport is not tried; `None` if it is.
pub(super) fn unfit(
    kind: TransportKind,
    peer: &EngineAddress,
    policy: Policy,
    rails: &Rails,
) -> Option<String> {
    let mut loopbacks = rails.iter().filter(|r| r.kind().is_loopback());
    if !kind.is_loopback() && loopbacks.any(|r| r.unfit(peer).is_none()) {
        return Some("the peer is this engine itself, which needs no link".into());
    }
    if peer.endpoints_of(kind).next().is_none() {
        return Some(not_offered(kind, peer));
    }
    if kind.is_fallback() && !policy.names_fallback {
        // RS-2: if both sides have NICs, a transfer over sockets would be a silent slow path.
        let ours = kinds(rails).into_iter().find(|k| k.has_nics());
        if let Some(ours) = ours.filter(|_| peer.has_nics()) {
            return Some(format!(
                "both sides have RDMA NICs ({ours} here), so {kind} is used only when asked for: \
                 name it among the allowed transports"
            ));
        }
    }
    // One fitting rail is enough; others report their cause when they are tried.
    let mut why = None;
    for rail in rails.iter().filter(|r| r.kind() == kind) {
        why.get_or_insert(rail.unfit(peer)?);
    }
    why
}

/// Says what a peer that does not offer a transport offers.
fn not_offered(kind: TransportKind, peer: &EngineAddress) -> String {
    let offers = peer.endpoints.iter().map(|e| e.transport);
    let mut offers: Vec<_> = offers.filter(|k| !k.is_loopback()).map(TransportKind::name).collect();
    offers.dedup();
    let mismatch = match kind.has_nics() && peer.has_nics() {
        true => "; the two don't speak to each other: give both sides the same one",
        false => "",
    };
    format!("the peer offers {}, not {kind}{mismatch}", offers.join(", "))
}
