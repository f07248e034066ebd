//! Handshakes that fail: what each side tells the other, and the log.

use super::messages::{Message, Party, Refusal, OUTDATED};
use crate::domain::DomainError;

/// A handshake that failed: what to tell the other side, if anything, and what to report here.
#[derive(Debug)]
pub(crate) struct Failure {
    pub reply: Option<Vec<u8>>,
    pub error: DomainError,
}

impl Failure {
    pub(super) fn silent(error: DomainError) -> Self {
        Self { reply: None, error }
    }

    /// An error of ours that the other side should hear of: it has proven itself.
    pub fn told(error: DomainError) -> Self {
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

/// An engine's label, before it has proven anything.
pub(super) fn claimed(party: &Party) -> String {
    format!("{}#{}", printable(&party.name, 64), party.id())
}

/// What a stranger says, fit for a line of a log: short, and without what ends lines or turns them around.
fn printable(said: &str, longest: usize) -> String {
    let plain = |c: &char| {
        !c.is_control() && !matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    said.chars().filter(plain).take(longest).collect()
}
