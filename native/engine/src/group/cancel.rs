//! Ends transfers before all their work is over: their deadline has passed, the caller cancelled,
//! or a lost rail is taken as lost alone.

use super::{route::PeerState, Group, TransferKey};
use crate::{time::Time, EngineError};

impl Group {
    /// Ends a transfer whose deadline has passed.
    pub(super) fn expire(&mut self, now: Time, key: TransferKey) {
        let Some(transfer) = self.transfers.get_mut(key.slot as usize) else { return };
        let route = &self.peers[transfer.peer as usize];
        let error = EngineError::Timeout {
            op: transfer.name,
            peer: route.address.label(),
            missing: 0,
            after: transfer.timeout,
            quiesced: transfer.outstanding == 0,
            hint: match (route.state, transfer.name) {
                (PeerState::Up, "send") => {
                    ": see whether the peer's receive pool is open and has room"
                }
                (PeerState::Up, _) if transfer.outstanding == 0 => "",
                (PeerState::Up, _) => {
                    "; it may still touch memory until the link is closed, so keep the buffers"
                }
                _ => ": there is no connection to it yet; explain() says what was tried",
            },
        };
        // The result is known by the deadline (IC-4). Work under way keeps its memory until its
        // link releases it (MR-1).
        transfer.end_early(error);
        transfer.flight.notified(now);
        self.settle(key);
    }

    /// Takes a lost rail of a transfer as lost alone: its peer was not lost in time.
    pub(super) fn decide(&mut self, key: TransferKey) {
        let transfer = self.transfers.get_mut(key.slot as usize);
        let transfer = transfer.filter(|t| t.serial == key.serial);
        if transfer.is_some_and(|t| t.undecided.take().is_some()) {
            self.settle(key);
        }
    }

    /// Cancels a transfer. Work under way keeps its memory until it is over (MR-1).
    pub fn cancel(&mut self, now: Time, key: TransferKey) {
        self.recorder.set_now(now);
        let transfer = self.transfers.get_mut(key.slot as usize);
        let Some(transfer) = transfer.filter(|t| t.serial == key.serial) else { return };
        let cause = match transfer.outstanding {
            0 => "nothing of it is under way".to_owned(),
            n => format!("{n} work requests are under way, keep the buffers until it is quiet"),
        };
        transfer.end_early(EngineError::Cancelled { what: transfer.name, cause });
        transfer.flight.notified(now);
        self.settle(key);
    }
}
