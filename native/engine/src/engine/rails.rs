//! The ways out of an engine, as it may use them now: for people, before they wonder why it is slow.

use super::TransferEngine;
use crate::{api::TransportKind, Result};

/// One NIC, or one transport within this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    pub transport: TransportKind,
    /// The NIC's name; empty where there is none.
    pub device: String,
    /// Bytes that may be under way over it at a time: less while other processes of this host have work
    /// for the same NIC.
    pub window: u64,
    /// Bytes that are under way over it, as far as they are limited.
    pub under_way: u64,
}

impl TransferEngine {
    /// All of them, in the order of their transports and NICs.
    ///
    /// # Errors
    /// [`EngineError::Forked`](crate::EngineError::Forked)
    pub fn rails(&self) -> Result<Vec<Rail>> {
        let core = self.shared.lock()?;
        let numbered = core.domains.iter().enumerate();
        let rails = numbered.map(|(number, domain)| {
            let (window, under_way) = core.group.use_of(number);
            Rail { transport: domain.kind(), device: domain.device().to_owned(), window, under_way }
        });
        Ok(rails.collect())
    }
}
