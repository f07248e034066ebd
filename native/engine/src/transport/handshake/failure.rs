//! Handshakes that fail: the reply to the other side, and the local error.

use super::messages::{EngineIdentity, Message, Refusal, OUTDATED};
use crate::domain::DomainError;

/// A failed handshake: the reply, if the other side gets one, and the error to report here.
#[derive(Debug)]
pub(crate) struct Failure {
    pub reply: Option<Vec<u8>>,
    pub error: DomainError,
}

impl Failure {
    pub(super) fn silent(error: DomainError) -> Self {
        Self { reply: None, error }
    }

    /// A local error that the peer may learn, because it has proven itself.
    pub fn with_reply(error: DomainError) -> Self {
        Self { error: error.clone(), ..Self::refuse(false, error.to_string()) }
    }

    pub(super) fn refuse(stale: bool, reason: String) -> Self {
        let reply = Message::Refusal(Refusal { stale, reason: reason.clone() }).encode();
        Self { reply: Some(reply), error: DomainError::Handshake(reason) }
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Message, Failure> {
    Message::decode(bytes).map_err(Failure::silent)
}

/// The refusal of a handshake of an earlier version, as that version reads it.
pub(super) fn outdated(bytes: &[u8]) -> Option<Failure> {
    OUTDATED.open(bytes).ok()?;
    let reason = "the handshake has version 1 at the initiator and version 2 at the acceptor; \
                  upgrade the older side";
    let refusal = Message::Refusal(Refusal { stale: false, reason: reason.into() });
    let reply = Some(OUTDATED.encode(&refusal));
    Some(Failure { reply, error: DomainError::Handshake(reason.into()) })
}

pub(super) fn unexpected(expected: &str) -> Failure {
    Failure::refuse(false, format!("the handshake is out of step: expected {expected}"))
}

pub(super) fn refused(r: Refusal) -> Failure {
    let reason = printable(&r.reason, 300);
    Failure::silent(match r.stale {
        true => DomainError::Stale(reason),
        false => DomainError::Handshake(reason),
    })
}

/// Label of an engine that has not proven anything yet.
pub(super) fn claimed(party: &EngineIdentity) -> String {
    format!("{}#{}", printable(&party.name, 64), party.id())
}

/// Text from an unproven peer, shortened and without characters that end or reorder log lines.
fn printable(said: &str, longest: usize) -> String {
    let plain = |c: &char| {
        !c.is_control() && !matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    said.chars().filter(plain).take(longest).collect()
}
