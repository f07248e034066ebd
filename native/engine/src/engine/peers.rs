use std::{fmt, sync::Arc};

use crate::{
    api::{EngineAddress, EngineId},
    group::{Hold, PeerKey},
};

/// Another engine, as this one knows it: one life of it (MR-2). Cheap to clone.
#[derive(Clone)]
pub struct Peer {
    pub(crate) key: PeerKey,
    /// Which engine this name was made by; keys of one engine mean nothing to another.
    pub(crate) known_to: EngineId,
    pub(crate) hold: Hold,
    /// As it was named by whoever made this known: who else named the same engine may have said something else of it.
    pub(crate) address: Arc<EngineAddress>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({})", self.address.label())
    }
}

impl Peer {
    pub fn address(&self) -> &EngineAddress {
        &self.address
    }

    pub fn id(&self) -> EngineId {
        self.address.id
    }
}

/// Peers that are addressed together, looked up once.
#[derive(Clone, Debug)]
pub struct PeerGroup {
    pub(crate) peers: Arc<[Peer]>,
}

impl PeerGroup {
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }
}
