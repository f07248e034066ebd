use std::{fmt, sync::Arc};

use crate::{
    api::{EngineAddress, EngineId},
    group::{PeerHold, PeerKey},
};

/// One incarnation of another engine (MR-2). Cheap to clone.
#[derive(Clone)]
pub struct Peer {
    pub(crate) key: PeerKey,
    /// The engine that made this object; its keys mean nothing to another engine.
    pub(crate) known_to: EngineId,
    pub(crate) hold: PeerHold,
    /// The address that the caller gave; another caller may have given another one for this engine.
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

/// Peers that are addressed together.
#[derive(Clone, Debug)]
pub struct PeerGroup {
    pub(crate) peers: Arc<[Peer]>,
}

impl PeerGroup {
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }
}
