//! The rails of an engine and their current limits, so that users can see why it is slow.

use super::TransferEngine;
use crate::{api::TransportKind, Result};

/// One NIC, or one transport within this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    pub transport: TransportKind,
    /// The NIC's name; empty where there is none.
    pub device: String,
    /// Bytes that may be under way at a time; less while other processes of this host use the same
    /// NIC.
    pub window: u64,
    /// Bytes under way that count against `window`.
    pub under_way: u64,
}

impl TransferEngine {
    /// All rails, in the order of their transports and NICs.
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
