use std::collections::VecDeque;

use smallvec::SmallVec;

use super::{slices::BoundOp, transfer::TransferKey, Rails};
use crate::{
    api::{EngineAddress, TransportKind},
    domain::{DomainError, LinkId},
    EngineError,
};

/// Names a peer within its group.
pub(crate) type PeerKey = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Idle,
    Connecting,
    Up,
    Lost,
}

/// Why a transport is or isn't used towards a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub transport: TransportKind,
    pub chosen: bool,
    pub reason: String,
}

/// One peer: how to reach it, and what waits for it.
pub(super) struct Route {
    pub address: EngineAddress,
    pub state: State,
    /// Links that are up, the preferred rail first. Two where both sides connected at once.
    links: SmallVec<[(usize, LinkId); 1]>,
    link_note: String,
    pub trying: Option<(usize, LinkId)>,
    pub untried: VecDeque<usize>,
    reasons: Vec<(TransportKind, String)>,
    /// What says more than that nobody answered: somebody else did, or refused, or a limit of this
    /// process is in the way.
    telling: Option<DomainError>,
    pub lost: Option<EngineError>,
    pub backlog: VecDeque<(TransferKey, BoundOp)>,
}

impl Route {
    pub fn new(address: EngineAddress) -> Self {
        Self {
            address,
            state: State::Idle,
            links: SmallVec::new(),
            link_note: String::new(),
            trying: None,
            untried: VecDeque::new(),
            reasons: Vec::new(),
            telling: None,
            lost: None,
            backlog: VecDeque::new(),
        }
    }

    /// The link to post on. Only while `Up`.
    pub fn link(&self) -> (usize, LinkId) {
        self.links[0]
    }

    /// Starts over: every transport that is fit for this peer is tried in order of preference.
    pub fn begin(&mut self, rails: &Rails) {
        self.state = State::Connecting;
        self.reasons.clear();
        self.untried.clear();
        self.telling = None;
        for (i, rail) in rails.iter().enumerate() {
            match rail.unfit(&self.address) {
                None => self.untried.push_back(i),
                Some(reason) => self.note(rail.kind(), reason),
            }
        }
    }

    pub fn note(&mut self, kind: TransportKind, reason: String) {
        self.reasons.push((kind, reason));
    }

    /// A transport was tried in vain.
    pub fn failed(&mut self, kind: TransportKind, cause: DomainError) {
        self.note(kind, cause.to_string());
        let telling = match &cause {
            DomainError::Stale(_) | DomainError::Handshake(_) => true,
            DomainError::Io { errno, .. } => EngineError::is_limit(*errno),
            _ => false,
        };
        if telling {
            self.telling = Some(cause);
        }
    }

    pub fn up(&mut self, rail: usize, link: LinkId, note: String) {
        if self.trying == Some((rail, link)) {
            self.trying = None;
        }
        self.links.push((rail, link));
        self.links.sort_by_key(|(rail, _)| *rail);
        if self.links[0] == (rail, link) {
            self.link_note = note;
        }
        self.state = State::Up;
        self.lost = None;
    }

    /// Forgets a link; true if it was the last one.
    pub fn down(&mut self, rail: usize, link: LinkId) -> bool {
        self.links.retain(|l| *l != (rail, link));
        self.links.is_empty() && self.state == State::Up
    }

    /// The engine's words for what a domain said about this peer.
    pub fn blame(&self, kind: TransportKind, op: &'static str, e: DomainError) -> EngineError {
        let peer = self.address.label();
        match e {
            DomainError::LinkDown(cause) => EngineError::lost(peer, kind, cause),
            DomainError::Stale(cause) => EngineError::Stale {
                what: format!("the region of {peer} named by the {op}"),
                cause,
            },
            DomainError::Refused(cause) => EngineError::Refused { peer, op, cause },
            DomainError::Handshake(cause) => EngineError::Handshake { peer, cause },
            DomainError::Io { call, errno } => {
                EngineError::lost(peer, kind, format!("{call}: {errno}"))
            }
            DomainError::Unavailable(reasons) => EngineError::Unreachable { peer, reasons },
        }
    }

    /// Every transport was tried in vain.
    pub fn unreachable(&self) -> EngineError {
        let peer = self.address.label();
        let reasons: Vec<_> = self.reasons.iter().map(|(k, r)| format!("{k}: {r}")).collect();
        let reasons = match reasons.is_empty() {
            true => "none of its transports is allowed here".to_owned(),
            false => reasons.join("; "),
        };
        match self.telling {
            Some(DomainError::Stale(_)) => {
                EngineError::Stale { what: format!("the address of {peer}"), cause: reasons }
            }
            Some(DomainError::Handshake(_)) => EngineError::Handshake { peer, cause: reasons },
            Some(DomainError::Io { call, errno }) => EngineError::resource(call, errno),
            _ => EngineError::Unreachable { peer, reasons },
        }
    }

    pub fn explain(&self, rails: &Rails) -> (Option<String>, Vec<Verdict>) {
        let used = self.links.first().map(|(rail, link)| {
            let detail = rails[*rail].describe(*link);
            (rails[*rail].kind(), format!("{}; {detail}", self.link_note))
        });
        let verdicts = rails.iter().map(|rail| {
            let transport = rail.kind();
            let found = self.reasons.iter().find(|(k, _)| *k == transport);
            match (&used, found) {
                (Some((kind, why)), _) if *kind == transport => {
                    Verdict { transport, chosen: true, reason: why.clone() }
                }
                (_, Some((_, reason))) => {
                    Verdict { transport, chosen: false, reason: reason.clone() }
                }
                _ => {
                    let reason = match rail.unfit(&self.address) {
                        Some(reason) => reason,
                        None if used.is_some() => "not needed: a preferred one works".into(),
                        None => "not tried yet".into(),
                    };
                    Verdict { transport, chosen: false, reason }
                }
            }
        });
        (used.as_ref().map(|(k, _)| k.to_string()), verdicts.collect())
    }
}
