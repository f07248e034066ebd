use std::sync::Arc;

use super::{
    land::Job,
    node::{LinkEnd, Port},
    wire::{Event, Route, World},
    SimConfig,
};
use crate::{
    api::{Endpoint, EngineAddress, RegionKey, TransportKind},
    domain::{
        Admit, Caps, Completion, Domain, DomainError, LinkId, LinkName, MessageRoom, NicKeys,
        PeerMapping, Pinned, Post, Receipts, RegionRelease, Token, WorkRequest,
    },
    locks::Mutex,
    memory::RegionMemory,
    time::Time,
};

/// One NIC of a node in the simulated network.
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

impl SimDomain {
    pub(crate) fn new(port: Port, world: Arc<Mutex<World>>) -> Self {
        Self { port, name: format!("sim{}", port.rail), world }
    }

    /// The other end of a link that is up here, and the link's name.
    fn remote_end(&self, world: &World, link: LinkId) -> Option<(LinkEnd, LinkName)> {
        let end = world.nodes.get(&self.port)?.links.get(&link)?;
        Some((end.remote, end.name))
    }

    fn route(&self, to: Port, name: LinkName) -> Route {
        Route { from: self.port, to, name }
    }
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

    fn deregister(&mut self, index: u32) -> RegionRelease {
        let mut world = self.world.lock();
        if let Some(node) = world.nodes.get_mut(&self.port) {
            // As with a NIC, later deliveries find an invalid key.
            node.book.remove(index);
        }
        world.deregister(self.port, index)
    }

    fn map_peer_region(
        &mut self,
        link: LinkId,
        key: RegionKey,
        _by: Option<i32>,
    ) -> Result<Arc<PeerMapping>, String> {
        let mut world = self.world.lock();
        let (remote, _) = self.remote_end(&world, link).ok_or("the link is down")?;
        world.open_peer_mapping((self.port, remote.0), key, Arc::downgrade(&self.world))
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
            return Err(DomainError::LinkDown("this node has ended".into()));
        };
        let link = node.new_link();
        let to = Port { engine: peer.id, rail: endpoint as u8 };
        let route = self.route(to, 0);
        world.send(route, 0, Event::Connect { from: self.port, to, link });
        Ok(link)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        let mut world = self.world.lock();
        let Some((remote, name)) = self.remote_end(&world, link) else { return };
        let cause = DomainError::LinkDown(cause.into());
        world.cut((self.port, link), &cause);
        world.send(self.route(remote.0, name), 0, Event::Cut { at: remote, cause });
    }

    fn receipts(&self) -> Receipts {
        self.world.lock().config.receipts()
    }

    fn send_group_frame(&mut self, link: LinkId, frame: Vec<u8>) {
        let mut world = self.world.lock();
        if let Some((to, name)) = self.remote_end(&world, link) {
            world.send(self.route(to.0, name), 0, Event::GroupFrame { to, frame });
        }
    }

    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let mut world = self.world.lock();
        let SimConfig { window, page_counts, carries, .. } = world.config;
        world.stirred.insert(self.port.engine);
        let Some((to, name)) = self.remote_end(&world, link) else {
            return Err(DomainError::LinkDown("the link is down".into()));
        };
        if matches!(wr, WorkRequest::Prepare { .. }) {
            return Ok(Post::Done);
        }
        let Some(node) = world.nodes.get_mut(&self.port) else { return Ok(Post::Full) };
        let Some(end) = node.links.get_mut(&link) else { return Ok(Post::Full) };
        if end.posted.len() >= window {
            return Ok(Post::Full);
        }
        let number = end.begin(token);
        node.posts += 1;
        let from = (self.port, link);
        world.trace_posted(from, token, wr);
        if let WorkRequest::Send(message) = wr {
            let message = Arc::clone(message);
            let event = Event::Message { from, to, token, number, message };
            world.send(self.route(to.0, name), 0, event);
        } else if let Some(job) =
            Job::new((from, to, name), (token, number), wr, (page_counts, carries))
        {
            let job = Arc::new(job);
            for (chunk, bytes) in job.deliveries().into_iter().enumerate() {
                world.send(job.route(), bytes, Event::Land { job: Arc::clone(&job), chunk });
            }
        }
        Ok(Post::Queued)
    }

    fn poll(&mut self, _now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let before = out.len();
        let mut world = self.world.lock();
        let Some(node) = world.nodes.get_mut(&self.port) else { return false };
        out.extend(node.inbox.drain(..));
        world.trace_notified(self.port, &out[before..]);
        let Some(node) = world.nodes.get_mut(&self.port) else { return false };
        if let Some(waiting) = node.waiting.pop_front() {
            let len = waiting.message.len();
            let result = match room.admit(len) {
                Admit::Wait => {
                    node.waiting.push_front(waiting);
                    return out.len() > before;
                }
                Admit::TooLong { limit } => Err(DomainError::Refused(format!(
                    "the message of {len} bytes is longer than the peer's receive buffers of {limit} bytes"
                ))),
                Admit::Take => {
                    let message = waiting.message.as_ref().into();
                    out.push(Completion::Message { link: waiting.link, message });
                    Ok(())
                }
            };
            let (to, token) = (waiting.sender, waiting.token);
            if let Some((_, name)) = self.remote_end(&world, waiting.link) {
                world.send(self.route(to.0, name), 0, Event::Done { to, token, result });
            }
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
        let mut world = self.world.lock();
        let there = world.delay();
        let cause = DomainError::Gone("its engine was closed".into());
        world.end(self.port, there, &cause);
    }
}
