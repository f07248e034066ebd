//! Posts copies and counts, and reports those that have ended.

use std::sync::Arc;

use smallvec::{smallvec, SmallVec};

use super::{
    control_socket::Frame,
    copies::{CopyTask, Operation, POPULATED},
    imports::{Import, RegionAccess},
    jobs::CopyJob,
    link::{self, Link},
    raw::Direction,
    ShmDomain,
};
use crate::{
    domain::{
        Completion, Count, Data, DomainError, LinkId, Post, Seq, SmallWrite, Token, WorkRequest,
    },
    memory::RegionMemory,
};

impl ShmDomain {
    /// Checks that all pages lie inside the region.
    fn check(data: &Data, import: &Import) -> Result<(), DomainError> {
        let last = match &data.remote_seq {
            Seq::Strided { .. } => Some(data.remote_seq.nth(data.pages.saturating_sub(1))),
            Seq::Indexed { list, offset, stride, .. } => {
                u64::from(list.max()).checked_mul(*stride).and_then(|n| n.checked_add(*offset))
            }
        };
        match last.is_some_and(|last| Self::holds(import, last, data.page_len)) {
            true => Ok(()),
            false => Err(DomainError::Refused(format!(
                "bytes outside region {} of {} bytes",
                import.key.index, import.len
            ))),
        }
    }

    /// Whether a region holds `len` bytes at `offset`, by its owner's descriptor (MR-3).
    #[inline]
    fn holds(import: &Import, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= import.len)
    }

    /// Copies data if its region is resolved; otherwise resolves the region first.
    pub(super) fn post_data(
        &mut self,
        id: LinkId,
        token: Token,
        wr: &WorkRequest,
    ) -> Result<Post, DomainError> {
        let (data, count, operation) = match wr {
            WorkRequest::Write { data, count } => (data, *count, Operation::Copy(Direction::Out)),
            WorkRequest::Read { data } => (data, None, Operation::Copy(Direction::In)),
            WorkRequest::Prepare { data } => (data, None, Operation::Populate),
            WorkRequest::Count(_) | WorkRequest::Send(_) => unreachable!("they carry no data"),
        };
        // CPUs can't copy GPU memory, and a pool thread should be the one that waits for a copy
        // engine.
        let device = self.book.get(data.local_region).and_then(|r| r.location.cuda());
        let device = device.map(|range| range.device);
        let copy_by_engine = device.is_some() || data.remote.memory_kind().is_device();
        let inline = !copy_by_engine && data.bytes() <= self.inline_left;
        let (pool, links) = (&self.pool, &mut self.links);
        let link = &mut links[Self::slot(id)];
        if link.imports.get(data.remote).is_none() {
            let known = link.resolving.contains_key(&data.remote);
            if !known && link.resolving.len() >= link::MAX_RESOLVING {
                return Ok(Post::Full);
            }
            let waiting = link.resolving.entry(data.remote).or_default();
            waiting.push((token, wr.clone()));
            if waiting.len() == 1 {
                let _ = link.send(&Frame::Resolve(data.remote), smallvec![]);
                self.update_interest(id);
            }
            return Ok(Post::Queued);
        }
        if count.is_some() && !link.can_count() {
            return Ok(Post::Full);
        }
        let Some(import) = link.imports.get(data.remote) else {
            return Ok(Post::Full);
        };
        Self::check(data, import)?;
        if inline {
            CopyTask { data, import, operation, device }.run(&pool.copier)?;
            self.inline_left -= data.bytes();
            return Ok(match count {
                Some(count) => self.post_count(id, token, count),
                None => Post::Done,
            });
        }
        let import = Arc::clone(import);
        let job = CopyJob::new(data.clone(), import, (operation, device), (id, token, count));
        link.jobs.push(Arc::clone(&job));
        pool.submit(job);
        Ok(Post::Queued)
    }

    /// Copies small writes on this thread and then sends their one count. `None` if a region is not
    /// mapped here, the ring is full, or the bytes exceed what a call copies itself.
    #[inline]
    pub(super) fn post_small(
        &mut self,
        id: LinkId,
        token: Token,
        writes: &[SmallWrite],
        count: Option<Count>,
    ) -> Option<Post> {
        if !self.batching {
            self.inline_left = self.inline_bytes;
        }
        let link = self.links.get_mut(Self::slot(id)).filter(|l| l.id == id && l.is_up())?;
        if link.closing.is_some() || count.is_some() && !link.can_count() {
            return None;
        }
        for w in writes {
            let is_device = |r: &Arc<RegionMemory>| r.location.cuda().is_some();
            if w.len > self.inline_left || self.book.get(w.local_region).is_some_and(is_device) {
                return None;
            }
            let import = link.imports.get(w.remote)?;
            let RegionAccess::Mapped(mapping) = &import.reach else { return None };
            if !Self::holds(import, w.remote_offset, w.len) {
                return None;
            }
            let to = import.base + w.remote_offset as usize;
            if w.len >= POPULATED {
                mapping.populate(to, w.len as usize);
            }
            // SAFETY: the remote range was checked against the import's length, and the import
            // keeps its mapping. The local range lies in a region that the caller keeps registered.
            // The mappings are different.
            unsafe { self.pool.copier.copy(to, w.local.0, w.len as usize) };
            self.inline_left -= w.len;
        }
        let Some(count) = count else { return Some(Post::Done) };
        Some(Self::send_count(link, (self.batching, &mut self.to_wake), token, count))
    }

    /// Sends a count on a link that has room for it.
    #[inline]
    pub(super) fn post_count(&mut self, id: LinkId, token: Token, count: Count) -> Post {
        let link = self.links.get_mut(Self::slot(id)).filter(|l| l.id == id);
        let Some(link) = link else { return Post::Full };
        Self::send_count(link, (self.batching, &mut self.to_wake), token, count)
    }

    /// As `post_count`. While a request is being posted, its peers are woken later.
    #[inline]
    fn send_count(
        link: &mut Link,
        (batching, to_wake): (bool, &mut SmallVec<[LinkId; 4]>),
        token: Token,
        count: Count,
    ) -> Post {
        let over = link.push_count(token, count, !batching);
        if batching && to_wake.last() != Some(&link.id) {
            to_wake.push(link.id);
        }
        match over {
            true => Post::Done,
            false => Post::Queued,
        }
    }

    /// Reports a copy that has ended. On a closing link chunks may have been skipped, so it counts
    /// as failed whatever its result (RS-1).
    pub(super) fn finish_job(&mut self, job: &Arc<CopyJob>, out: &mut Vec<Completion>) {
        let Some(link) = self.link(job.link) else { return };
        link.jobs.retain(|j| !Arc::ptr_eq(j, job));
        let (link_id, token) = (link.id, job.token);
        match (job.result(), job.count, &link.closing) {
            (Ok(()), Some(count), None) => link.count_copy(token, count, out),
            (Ok(()), _, Some(cause)) => {
                let result = Err(cause.clone());
                out.push(Completion::Done { link: link_id, token, result });
            }
            (result, ..) => out.push(Completion::Done { link: link_id, token, result }),
        }
    }

    /// Retries work that waited for room in the ring.
    pub(super) fn retry_deferred(&mut self, id: LinkId, out: &mut Vec<Completion>) -> bool {
        let mut progressed = false;
        while let Some((token, wr)) = self.link(id).and_then(|l| l.deferred.pop_front()) {
            let done = match self.post_data(id, token, &wr) {
                Ok(Post::Full) => {
                    if let Some(l) = self.link(id) {
                        l.deferred.push_front((token, wr));
                    }
                    break;
                }
                Ok(Post::Queued) => None,
                Ok(Post::Done) => Some(Ok(())),
                Err(e) => Some(Err(e)),
            };
            progressed = true;
            out.extend(done.map(|result| Completion::Done { link: id, token, result }));
        }
        progressed
    }
}
