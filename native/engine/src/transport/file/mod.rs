//! The transport of an engine to itself: copies among its own memory and files. Its only peer is
//! the engine itself, so spilling a page and fetching it back are ordinary requests, counted by the
//! engine's own counters.
//!
//! Files are read into and written from the named memory without staging. Only between two
//! locations that CPUs can't access (file and file, or file and GPU) do bytes pass through a slot
//! of host memory.

mod job;

use std::{collections::VecDeque, sync::Arc};

use slab::Slab;

use crate::{
    api::{Endpoint, EngineAddress, EngineId, TransportKind},
    domain::{
        Admit, Caps, Completion, Domain, DomainError, LinkId, MessageRoom, NicKeys, PeerIdentity,
        Pinned, Post, RegionRelease, Token, WorkRequest,
    },
    memory::{device::AsyncCopier, file::FileQueue, RegionBook, RegionMemory},
    time::Time,
};
use job::{ActiveChunk, Job, Slots};

/// Chunks under way: disks work best with several requests.
const MAX_MOVING: usize = 16;
/// Work requests accepted; further ones wait in the group.
const MAX_JOBS: usize = 1 << 12;
/// Bytes that CPUs copy per poll, under the engine's lock.
const MAX_COPIED: u64 = 4 << 20;

/// The file transport; see the module.
pub(crate) struct FileDomain {
    own: Option<EngineAddress>,
    book: RegionBook,
    copier: AsyncCopier,
    slots: Slots,
    link: Option<LinkId>,
    links: LinkId,
    jobs: Slab<Job>,
    /// Jobs that are not fully cut into chunks, in order.
    queue: VecDeque<usize>,
    moving: Vec<ActiveChunk>,
    /// Of the link that is up.
    messages: VecDeque<(Token, Arc<[u8]>)>,
    /// Deregistered regions whose last chunk has not ended.
    retiring: Vec<u32>,
    completions: Vec<Completion>,
    /// Closing links, reported after their last chunks have ended.
    closing: Vec<(LinkId, DomainError)>,
}

impl std::fmt::Debug for FileDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileDomain({} jobs, {} chunks)", self.jobs.len(), self.moving.len())
    }
}

impl FileDomain {
    pub fn new(files: &Arc<FileQueue>) -> Self {
        Self {
            own: None,
            book: RegionBook::default(),
            copier: AsyncCopier::new(files),
            slots: Slots::default(),
            link: None,
            links: 0,
            jobs: Slab::new(),
            queue: VecDeque::new(),
            moving: Vec::new(),
            messages: VecDeque::new(),
            retiring: Vec::new(),
            completions: Vec::new(),
            closing: Vec::new(),
        }
    }

    fn id(&self) -> Option<EngineId> {
        self.own.as_ref().map(|own| own.id)
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
            && self.completions.is_empty()
            && self.messages.is_empty()
            && self.retiring.is_empty()
            && self.closing.is_empty()
    }

    /// Starts as many chunks as may be under way and be copied per poll.
    fn begin_chunks(&mut self) -> bool {
        let (mut moved, mut copied) = (false, 0);
        while self.moving.len() < MAX_MOVING && copied < MAX_COPIED {
            let Some(key) = self.queue.front().copied() else { break };
            let job = &mut self.jobs[key];
            if job.has_begun() {
                self.queue.pop_front();
                moved |= self.finish(key);
                continue;
            }
            let slot = match job.needs_slot() {
                false => None,
                true => match self.slots.take(job.locations()) {
                    Ok(Some(slot)) => Some(slot),
                    Ok(None) => break,
                    Err(e) => {
                        job.fail(e);
                        continue;
                    }
                },
            };
            moved = true;
            let job = &mut self.jobs[key];
            match job.begin_chunk(key, slot, &mut self.copier) {
                Ok(moving) => {
                    copied += moving.bytes;
                    self.moving.push(moving);
                }
                Err(e) => {
                    job.fail(e);
                    self.slots.give_back(slot);
                }
            }
        }
        moved
    }

    /// Advances chunks whose copy has ended.
    fn step_chunks(&mut self) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.moving.len() {
            let moving = &mut self.moving[i];
            let Some(result) = self.copier.poll(&moving.copy) else {
                i += 1;
                continue;
            };
            moved = true;
            let job = &mut self.jobs[moving.job];
            match result.and_then(|()| job.next_half(moving, &mut self.copier)) {
                Ok(true) => i += 1,
                ended => {
                    let ActiveChunk { job: key, slot, .. } = self.moving.remove(i);
                    self.slots.give_back(slot);
                    job.ended(ended.err());
                    self.finish(key);
                }
            }
        }
        moved
    }

    /// Reports a finished job: its count after its bytes are in place (IC-2), or its error.
    fn finish(&mut self, key: usize) -> bool {
        let job = &self.jobs[key];
        if !job.is_over() {
            return false;
        }
        let job = self.jobs.remove(key);
        self.queue.retain(|queued| *queued != key);
        let (link, token, result) = (job.link, job.token, job.result());
        self.completions.extend(job.count.filter(|_| result.is_ok()).map(Completion::Count));
        self.completions.push(Completion::Done { link, token, result });
        let regions = [&job.local, &job.remote].map(|region| region.key.index);
        for index in regions {
            let used = |(_, job): (usize, &Job)| job.uses(index);
            if self.retiring.contains(&index) && !self.jobs.iter().any(used) {
                self.retiring.retain(|r| *r != index);
                self.completions.push(Completion::RegionReleased { index });
            }
        }
        true
    }

    /// Delivers at most one message: each takes its buffer of the pool before the next is admitted.
    fn deliver(&mut self, room: &dyn MessageRoom) -> bool {
        let mut moved = false;
        while let (Some(link), Some((token, message))) = (self.link, self.messages.pop_front()) {
            let result = match room.admit(message.len()) {
                Admit::Wait => {
                    self.messages.push_front((token, message));
                    break;
                }
                Admit::TooLong { limit } => Err(DomainError::Refused(format!(
                    "the message of {} bytes is longer than the receive buffers of {limit} bytes",
                    message.len()
                ))),
                Admit::Take => {
                    self.completions.push(Completion::Message { link, message: (*message).into() });
                    Ok(())
                }
            };
            let taken = result.is_ok();
            self.completions.push(Completion::Done { link, token, result });
            moved = true;
            if taken {
                break;
            }
        }
        moved
    }

    /// Reports the end of links whose last chunk has ended (MR-1).
    fn report_ended_links(&mut self) {
        let ended = |(link, _): &mut (LinkId, DomainError)| {
            !self.jobs.iter().any(|(_, job)| job.link == *link)
        };
        for (link, cause) in self.closing.extract_if(.., ended) {
            let (receipt, unfinished) = Default::default();
            self.completions.push(Completion::LinkDown { link, cause, receipt, unfinished });
        }
    }
}

impl Domain for FileDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::File
    }

    fn caps(&self) -> Caps {
        Caps { max_bytes: u64::MAX, max_pages: u32::MAX, max_message: usize::MAX }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::File, data: Vec::new() }
    }

    fn announce(&mut self, own: &EngineAddress) {
        self.own = Some(own.clone());
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        self.book.insert(region);
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, index: u32) -> RegionRelease {
        self.book.remove(index);
        if !self.jobs.iter().any(|(_, job)| job.uses(index)) {
            return RegionRelease::Now;
        }
        self.retiring.push(index);
        RegionRelease::Later
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        match self.id() == Some(peer.id) {
            true => None,
            false => Some("it serves this engine's own files and memory only".into()),
        }
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let Some(own) = self.own.clone().filter(|own| own.id == peer.id) else {
            return Err(DomainError::Unavailable("it serves this engine only".into()));
        };
        self.links += 1;
        let link = self.links;
        self.link = Some(link);
        self.completions.push(Completion::LinkUp {
            link,
            peer: PeerIdentity { address: own, version: None },
            endpoint,
            name: u64::from(link),
            description: "this engine itself".into(),
        });
        self.copier.wake();
        Ok(link)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        if self.link != Some(link) {
            return;
        }
        self.link = None;
        let cause = DomainError::LinkDown(cause.to_owned());
        self.queue.clear();
        self.jobs.iter_mut().for_each(|(_, job)| job.fail(cause.clone()));
        let down = |token| Completion::Done { link, token, result: Err(cause.clone()) };
        self.completions.extend(self.messages.drain(..).map(|(token, _)| down(token)));
        self.closing.push((link, cause));
        for key in self.jobs.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            self.finish(key);
        }
    }

    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        if self.link != Some(link) {
            return Err(DomainError::LinkDown("the link is down".into()));
        }
        let (data, count, write) = match wr {
            WorkRequest::Prepare { .. } => return Ok(Post::Done),
            WorkRequest::Count(count) => {
                self.completions.push(Completion::Count(*count));
                self.copier.wake();
                return Ok(Post::Done);
            }
            WorkRequest::Send(message) => {
                self.messages.push_back((token, Arc::clone(message)));
                self.copier.wake();
                return Ok(Post::Queued);
            }
            WorkRequest::Write { data, count } => (data, *count, true),
            WorkRequest::Read { data } => (data, None, false),
        };
        if self.jobs.len() >= MAX_JOBS {
            return Ok(Post::Full);
        }
        let local = self.book.get(data.local_region).cloned();
        let local = local.ok_or_else(|| {
            DomainError::Refused("the local region is not registered any more".into())
        })?;
        let remote = Arc::clone(self.book.lookup(data.remote)?);
        let job = Job::new((link, token), (data.clone(), count, write), (local, remote))?;
        let key = self.jobs.insert(job);
        self.queue.push_back(key);
        // The worker may sleep, and nothing else wakes it.
        self.copier.wake();
        Ok(Post::Queued)
    }

    fn poll(&mut self, _now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        if self.is_idle() {
            return false;
        }
        let mut moved = self.step_chunks();
        moved |= self.begin_chunks();
        moved |= self.deliver(room);
        self.report_ended_links();
        moved |= !self.completions.is_empty();
        out.append(&mut self.completions);
        moved
    }

    fn flush(&mut self) {
        // Disks may start while the caller is still busy.
        self.begin_chunks();
    }

    fn takes_files(&self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        let room = self.moving.len() < MAX_MOVING && !self.queue.is_empty();
        let look = self.moving.iter().any(|m| m.copy.needs_check());
        self.completions.is_empty() && !look && !(room && self.slots.is_free())
    }

    fn disarm(&mut self) {}

    fn describe(&self, _link: LinkId) -> String {
        format!("files by {}, without staging", self.copier.files_by())
    }

    fn close(&mut self) {
        // After this nothing lands (MR-1).
        self.copier.close();
        self.moving.iter().for_each(|m| m.copy.quiesce());
        // The engine closes all its transports; every engine has this one.
        self.copier.close_files();
        self.link = None;
        self.closing.clear();
        self.queue.clear();
        self.moving.clear();
        self.jobs.clear();
        self.messages.clear();
        self.completions.clear();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        api::{RailKeys, RegionKey},
        domain::{Data, LocalAddr, Seq},
        memory::{
            device::Location,
            file::{FileBackend, FileMemory, FileOptions},
            Backing,
        },
        wake::Waker,
    };

    /// Has room for one message until that has reached the pool, after the poll.
    struct OneBuffer;

    impl MessageRoom for OneBuffer {
        fn admit(&self, _: usize) -> Admit {
            Admit::Take
        }
    }

    #[test]
    fn a_poll_delivers_one_message() {
        let mut domain = FileDomain::new(&FileQueue::new(&Waker::default(), FileBackend::Best));
        let id = EngineId::random().unwrap();
        let own = EngineAddress { id, name: "e".into(), endpoints: vec![domain.endpoint()] };
        domain.announce(&own);
        let link = domain.connect(Time(0), &own, 0).unwrap();
        for _ in 0..3 {
            let message = WorkRequest::Send(Arc::from(&b"m"[..]));
            domain.post(link, Token::default(), &message).unwrap();
        }
        for _ in 0..3 {
            let mut out = Vec::new();
            domain.poll(Time(1), &OneBuffer, &mut out);
            let messages = out.iter().filter(|c| matches!(c, Completion::Message { .. })).count();
            assert_eq!(messages, 1, "{out:?}");
        }
    }

    /// A link that goes down while a chunk is under way ends after its successor came up.
    #[test]
    fn rs_4_every_link_that_came_up_is_reported_down_once() {
        let mut domain = FileDomain::new(&FileQueue::new(&Waker::default(), FileBackend::Best));
        let id = EngineId::random().unwrap();
        let own = EngineAddress { id, name: "e".into(), endpoints: vec![domain.endpoint()] };
        domain.announce(&own);
        let path = std::env::temp_dir().join(format!("fabric-links-{}", std::process::id()));
        let options = FileOptions { len: Some(4096), create: true, ..Default::default() };
        let file = Location::File(Arc::new(FileMemory::open(&path, options).unwrap().0));
        std::fs::remove_file(&path).unwrap();
        let memory = vec![7u8; 4096];
        let region = |index, base, location| {
            let key = RegionKey { index, rkey: 1 };
            Arc::new(RegionMemory::new(key, base, 4096, Backing::Foreign, None).at(location))
        };
        let address = memory.as_ptr() as usize;
        domain.register(&region(1, address, Location::Host), None).unwrap();
        domain.register(&region(2, 0, file), None).unwrap();
        let data = Data {
            local: LocalAddr(address),
            local_region: 1,
            local_seq: Seq::at(0),
            remote: RegionKey { index: 2, rkey: 1 },
            remote_keys: RailKeys::default(),
            remote_seq: Seq::at(0),
            page_len: 4096,
            pages: 1,
        };
        let mut links = Vec::new();
        for _ in 0..3 {
            let link = domain.connect(Time(0), &own, 0).unwrap();
            let write = WorkRequest::Write { data: data.clone(), count: None };
            domain.post(link, Token::default(), &write).unwrap();
            domain.flush();
            let message = WorkRequest::Send(Arc::from(&b"m"[..]));
            domain.post(link, Token::default(), &message).unwrap();
            domain.disconnect(link, "test");
            links.push(link);
        }
        let mut out = Vec::new();
        let start = std::time::Instant::now();
        while !domain.is_idle() {
            assert!(start.elapsed().as_secs() < 20, "{domain:?}");
            domain.poll(Time(1), &OneBuffer, &mut out);
        }
        assert!(!out.iter().any(|c| matches!(c, Completion::Message { .. })), "{out:?}");
        for link in links {
            let of = |c: &&Completion| match c {
                Completion::Done { link: of, result, .. } => *of == link && result.is_err(),
                Completion::LinkDown { link: of, .. } => *of == link,
                _ => false,
            };
            let ends: Vec<_> = out.iter().filter(of).collect();
            assert_eq!(ends.len(), 3, "{ends:?}");
            assert!(matches!(ends[2], Completion::LinkDown { .. }), "{ends:?}");
        }
    }
}
