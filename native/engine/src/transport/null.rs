//! A transport that completes every work request at once and moves nothing. It measures the
//! engine's own cost.

use std::sync::Arc;

use crate::{
    api::{Endpoint, EngineAddress, TransportKind},
    domain::{
        Caps, Completion, Domain, DomainError, LinkId, MessageRoom, NicKeys, PeerIdentity, Pinned,
        Post, RegionRelease, Token, WorkRequest,
    },
    memory::RegionMemory,
    time::Time,
};

/// The null transport; see the module.
#[derive(Debug, Default)]
pub struct NullDomain {
    up: Vec<(LinkId, PeerIdentity)>,
    links: LinkId,
}

impl Domain for NullDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Null
    }

    fn caps(&self) -> Caps {
        Caps { max_bytes: u64::MAX, max_pages: 1, max_message: 1 << 16 }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Null, data: Vec::new() }
    }

    fn announce(&mut self, _own: &EngineAddress) {}

    fn register(
        &mut self,
        _region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, _index: u32) -> RegionRelease {
        RegionRelease::Now
    }

    fn unfit(&self, _peer: &EngineAddress) -> Option<String> {
        None
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: &EngineAddress,
        _endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        self.links += 1;
        self.up.push((self.links, PeerIdentity { address: peer.clone(), version: None }));
        Ok(self.links)
    }

    fn disconnect(&mut self, _link: LinkId, _cause: &str) {}

    fn post(&mut self, _: LinkId, _: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        std::hint::black_box(wr);
        Ok(Post::Done)
    }

    fn poll(&mut self, _now: Time, _: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let n = out.len();
        out.extend(self.up.drain(..).map(|(link, peer)| Completion::LinkUp {
            link,
            peer,
            endpoint: 0,
            name: 0,
            description: "null link".into(),
        }));
        out.len() > n
    }

    fn arm(&mut self) -> bool {
        self.up.is_empty()
    }

    fn disarm(&mut self) {}

    fn describe(&self, _link: LinkId) -> String {
        "nothing moves".into()
    }

    fn close(&mut self) {}
}
