use std::sync::Arc;

use parking_lot::Mutex;

use super::net::{Event, Held, Job, Piece, Port, World};
use crate::{
    api::{Endpoint, EngineAddress, TransportKind},
    domain::{
        Admit, Caps, Completion, Data, Domain, DomainError, LinkId, MessageRoom, NicKeys, Pinned,
        Post, Quiet, Receipts, Token, WorkRequest,
    },
    memory::RegionMemory,
    time::Time,
};

/// One node's link to the simulated network.
pub struct SimDomain {
    port: Port,
    name: String,
    world: Arc<Mutex<World>>,
}

impl std::fmt::Debug for SimDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimDomain({:?})", self.port)
    }
}

/// Pieces longer than this land in two halves, so that a count that came early would be caught.
const WHOLE: usize = 64;

impl SimDomain {
    pub(super) fn new(port: Port, world: Arc<Mutex<World>>) -> Self {
        Self { port, name: format!("sim{}", port.rail), world }
    }
}

/// The bytes of a work request as they are now, in the pieces in which they will land.
fn pieces(data: &Data, write: bool) -> (Vec<Piece>, Vec<usize>) {
    let (mut pieces, mut into) = (Vec::new(), Vec::new());
    for page in 0..data.pages {
        let n = data.page_len as usize;
        let cut = if n > WHOLE { n / 2 } else { n };
        for (from, to) in [(0, cut), (cut, n)] {
            if from == to {
                continue;
            }
            let addr = data.local.0 + data.local_seq.nth(page) as usize + from;
            let mut bytes = vec![0u8; to - from];
            if write {
                // SAFETY: the request keeps its local region registered, and its bounds were
                // checked.
                unsafe {
                    std::ptr::copy_nonoverlapping(addr as *const u8, bytes.as_mut_ptr(), to - from)
                };
            }
            pieces.push((data.remote_seq.nth(page) + from as u64, Mutex::new(bytes)));
            into.push(addr);
        }
    }
    (pieces, into)
}

impl Domain for SimDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }

    fn device(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        self.world.lock().caps()
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Sim, data: Vec::new() }
    }

    fn announce(&mut self, own: &EngineAddress) {
        if let Some(node) = self.world.lock().nodes.get_mut(&self.port) {
            node.address = Some(own.clone());
        }
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        if let Some(node) = self.world.lock().nodes.get_mut(&self.port) {
            node.book.insert(region);
        }
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, index: u32) -> Quiet {
        if let Some(node) = self.world.lock().nodes.get_mut(&self.port) {
            // As with an adapter: what lands from now on finds an invalid key.
            node.book.remove(index);
        }
        Quiet::Now
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        match peer.endpoint(TransportKind::Sim) {
            Some(_) => None,
            None => Some("the peer is not simulated".into()),
        }
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let mut world = self.world.lock();
        let Some(node) = world.nodes.get_mut(&self.port) else {
            return Err(DomainError::LinkDown("this node is dead".into()));
        };
        let link = node.new_link();
        let to = Port { engine: peer.id, rail: endpoint as u8 };
        world.later(Event::LinkUp { from: self.port, to, link });
        Ok(link)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        let mut world = self.world.lock();
        let end = world.nodes.get(&self.port).and_then(|n| n.links.get(&link));
        let Some((peer, back)) = end.map(|e| e.there) else { return };
        world.cut(self.port, link, cause);
        world.later(Event::Cut { port: peer, link: back, cause: cause.into() });
    }

    fn receipts(&self) -> Receipts {
        Receipts::ByImm
    }

    fn note(&mut self, link: LinkId, frame: Vec<u8>) {
        let mut world = self.world.lock();
        let end = world.nodes.get(&self.port).and_then(|n| n.links.get(&link));
        if let Some((port, link)) = end.map(|e| e.there) {
            world.later(Event::Tell { port, completion: Completion::Note { link, frame } });
        }
    }

    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let mut world = self.world.lock();
        let window = world.config.window;
        let node = world.nodes.get_mut(&self.port);
        let Some((node, (to, back))) =
            node.and_then(|n| n.links.get(&link).map(|e| e.there).map(|there| (n, there)))
        else {
            return Err(DomainError::LinkDown("the link is down".into()));
        };
        if matches!(wr, WorkRequest::Prepare { .. }) {
            return Ok(Post::Done);
        }
        let posted = node.posted.entry(link).or_default();
        if posted.len() >= window {
            return Ok(Post::Full);
        }
        posted.push(token);
        node.posts += 1;
        if let WorkRequest::Send(message) = wr {
            if let Some(there) = world.nodes.get_mut(&to) {
                let (message, sender) = (Arc::clone(message), (self.port, link));
                there.held.push_back(Held { link: back, message, sender, token });
            }
            return Ok(Post::Queued);
        }
        let (data, count) = match wr {
            WorkRequest::Write { data, count } => (Some((data, true)), *count),
            WorkRequest::Read { data } => (Some((data, false)), None),
            WorkRequest::Count(count) => (None, Some(*count)),
            WorkRequest::Send(_) | WorkRequest::Prepare { .. } => (None, None),
        };
        let (pieces, into) = data.map(|(d, w)| pieces(d, w)).unwrap_or_default();
        let read = matches!(wr, WorkRequest::Read { .. });
        let n = pieces.len().max(1);
        let job = Arc::new(Job {
            from: (self.port, link),
            to: (to, back),
            token,
            key: data.map_or(Default::default(), |(d, _)| d.remote),
            pieces,
            into: read.then_some(into),
            count,
            left: Mutex::new((n, None)),
        });
        for piece in 0..n {
            world.later(Event::Land { job: Arc::clone(&job), piece });
        }
        Ok(Post::Queued)
    }

    fn poll(&mut self, _now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let before = out.len();
        let mut world = self.world.lock();
        let Some(node) = world.nodes.get_mut(&self.port) else { return false };
        out.extend(node.inbox.drain(..));
        if let Some(held) = node.held.pop_front() {
            let len = held.message.len();
            let result = match room.admit(len) {
                Admit::Wait => {
                    node.held.push_front(held);
                    return out.len() > before;
                }
                Admit::TooLong { limit } => Err(DomainError::Refused(format!(
                    "{len} bytes are more than its receive pool's {limit}"
                ))),
                Admit::Take => {
                    let message = held.message.as_ref().into();
                    out.push(Completion::Message { link: held.link, message });
                    Ok(())
                }
            };
            let (port, link) = held.sender;
            let completion = Completion::Done { link, token: held.token, result };
            world.later(Event::Tell { port, completion });
        }
        out.len() > before
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn describe(&self, _link: LinkId) -> String {
        "unordered deliveries on a virtual clock".into()
    }

    fn close(&mut self) {
        self.world.lock().die(self.port, "its engine was closed");
    }
}
