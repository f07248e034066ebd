//! The phases of an exchange, as its caller goes through them.

use fabric_engine::EngineError;

/// The caller's last completed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No call yet, or `combine_recv`.
    Idle,
    /// `dispatch_send`.
    Dispatched,
    /// `dispatch_recv`.
    Collected,
    /// A `combine_send` that has not sent all answers yet.
    Answering,
    /// `combine_send`.
    Answered,
}

impl Phase {
    /// The error of a call that does not follow this phase.
    pub fn refuse(self, call: &str) -> EngineError {
        let next = match self {
            Self::Idle => "dispatch_send",
            Self::Dispatched => "dispatch_recv",
            Self::Answering => "combine_send",
            Self::Collected => "combine_send, or dispatch_send if every rank leaves combine out",
            Self::Answered => "combine_recv",
        };
        EngineError::Invalid(format!("{call} is not next; it is {next}"))
    }
}
