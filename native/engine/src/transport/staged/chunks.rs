//! The requesting side: jobs and their chunks.

use smallvec::{smallvec, SmallVec};

use super::{
    frames::{copy_error, local_pieces, slot_offset, Frame, Pages, Refusal, WINDOW_BYTES},
    job::{stages, Chunk, ChunkState, Job, PeerWindow, Stage, StagingMemory, STAGED_PART},
    ControlChannel, LinkState, Staged, MAX_JOBS, SLOTS,
};
use crate::{
    api::{RailKeys, RegionKey},
    domain::{Completion, Data, DomainError, LinkId, LocalAddr, Post, Seq, Token, WorkRequest},
    memory::{device::Pinned, FIRST_INTERNAL_INDEX},
};

impl<D: ControlChannel> Staged<D> {
    pub(super) fn submit(
        &mut self,
        link: LinkId,
        _token: Token,
        job: Job,
    ) -> Result<Post, DomainError> {
        let state = self.link_states.entry(link).or_default();
        if let Some(cause) = &state.closing {
            return Err(cause.clone());
        }
        if state.jobs >= MAX_JOBS {
            return Ok(Post::Full);
        }
        state.device |= job.touches_device();
        state.file |= job.touches_file();
        state.host |= !job.touches_device() && !job.touches_file();
        state.jobs += 1;
        let key = self.jobs.insert(job);
        state.queue.push_back(key);
        self.start_chunks(link);
        // The worker may sleep, and the end of a GPU's copy does not wake it.
        if !self.completions.is_empty() || self.chunks.iter().any(|(_, c)| c.needs_check()) {
            self.copier.wake();
        }
        Ok(Post::Queued)
    }

    pub(super) fn request_window(&mut self, link: LinkId) {
        let state = self.link_states.entry(link).or_default();
        if matches!(state.peer_window, PeerWindow::Unknown) {
            state.peer_window = PeerWindow::Requested;
            self.inner.send_control(link, Frame::OpenWindow.encode());
        }
    }

    pub(super) fn on_window(&mut self, link: LinkId, key: RegionKey) -> Result<(), DomainError> {
        let Some(state) = self.link_states.get_mut(&link) else { return Ok(()) };
        if !matches!(state.peer_window, PeerWindow::Requested)
            || key.index & FIRST_INTERNAL_INDEX == 0
        {
            return Err(DomainError::Handshake("a window without a request".into()));
        }
        state.peer_window = PeerWindow::Open { key, free: (0..SLOTS).collect() };
        self.start_chunks(link);
        Ok(())
    }

    pub(super) fn start_all_chunks(&mut self) -> bool {
        let waiting = self.link_states.iter().filter(|(_, s)| !s.queue.is_empty());
        let links: SmallVec<[LinkId; 8]> = waiting.map(|(link, _)| *link).collect();
        links.into_iter().fold(false, |progressed, link| self.start_chunks(link) | progressed)
    }

    /// Starts as many chunks of a link as there are slots for.
    fn start_chunks(&mut self, link: LinkId) -> bool {
        let mut progressed = false;
        while let Some(key) = self.link_states.get(&link).and_then(|s| s.queue.front().copied()) {
            let job = &self.jobs[key];
            if job.error.is_some() {
                self.unqueue(link, key);
                continue;
            }
            let (local, remote) = (job.local.is_some(), job.remote);
            if remote {
                self.request_window(link);
            }
            let Some((local_slot, remote_slot)) = self.take_slots(link, local, remote, key) else {
                break;
            };
            progressed = true;
            let job = &mut self.jobs[key];
            let data = job.chunking.nth(&job.data, job.next);
            let count = job.count.take_if(|_| job.chunking.chunks == 1);
            let stages = stages(job.write, local, remote);
            job.next += 1;
            job.running += 1;
            if job.next == job.chunking.chunks {
                self.unqueue(link, key);
            }
            self.start(Chunk {
                job: key,
                link,
                serial: 0,
                data,
                stages,
                at: 0,
                state: ChunkState::Ready,
                count,
                local_slot,
                remote_slot,
            });
        }
        progressed
    }

    fn unqueue(&mut self, link: LinkId, job: usize) {
        if let Some(state) = self.link_states.get_mut(&link) {
            state.queue.retain(|k| *k != job);
        }
    }

    /// Takes all slots that a chunk needs, or none, so that a chunk with a slot never waits for
    /// another.
    #[allow(clippy::type_complexity)]
    fn take_slots(
        &mut self,
        link: LinkId,
        local: bool,
        remote: bool,
        job: usize,
    ) -> Option<(Option<u8>, Option<(RegionKey, u8)>)> {
        if local && self.own.is_none() {
            match Pinned::new(WINDOW_BYTES) {
                Ok(memory) => self.own = Some(StagingMemory { memory, free: (0..SLOTS).collect() }),
                Err(e) => {
                    self.jobs[job].error = Some(e);
                    self.unqueue(link, job);
                    self.finish_job(job);
                    return None;
                }
            }
        }
        let state = self.link_states.get_mut(&link)?;
        let mut own = self.own.as_mut().filter(|_| local);
        if own.as_ref().is_some_and(|own| own.free.is_empty()) {
            return None;
        }
        let remote_slot = match &mut state.peer_window {
            _ if !remote => None,
            PeerWindow::Open { key, free } => Some((*key, free.pop()?)),
            _ => return None,
        };
        Some((own.as_mut().and_then(|own| own.free.pop()), remote_slot))
    }

    fn start(&mut self, mut chunk: Chunk) {
        self.serial = self.serial.wrapping_add(1);
        chunk.serial = self.serial;
        let key = self.chunks.insert(chunk);
        self.advance(key);
    }

    /// Advances chunks that wait for a copy engine, or for room in the transport.
    pub(super) fn advance_chunks(&mut self) -> bool {
        let due = self.chunks.iter().filter(|(_, c)| !matches!(c.state, ChunkState::Waiting));
        let due: SmallVec<[usize; 16]> = due.map(|(key, _)| key).collect();
        due.into_iter().fold(false, |progressed, key| self.advance(key) | progressed)
    }

    /// Advances a chunk as far as possible; false if it did not move.
    fn advance(&mut self, key: usize) -> bool {
        let mut progressed = false;
        loop {
            let Some(chunk) = self.chunks.get(key) else { return progressed };
            let result = match (&chunk.state, chunk.stage()) {
                (_, None) => {
                    self.end_chunk(key, Ok(()));
                    return true;
                }
                (ChunkState::Waiting, _) => return progressed,
                (ChunkState::Copying(copy), _) => match self.copier.poll(copy) {
                    None => return progressed,
                    Some(result) => result.map(|()| None),
                },
                (ChunkState::Ready, Some(Stage::LocalCopy)) => self.copy(key).map(Some),
                (ChunkState::Ready, Some(Stage::RemoteCopy)) => {
                    self.request_copy(key);
                    Ok(Some(ChunkState::Waiting))
                }
                (ChunkState::Ready, Some(Stage::Transfer | Stage::Count)) => {
                    match self.post_chunk(key) {
                        Ok(Post::Done) => Ok(None),
                        Ok(Post::Queued) => Ok(Some(ChunkState::Waiting)),
                        Ok(Post::Full) => return progressed,
                        Err(e) => Err(e),
                    }
                }
            };
            progressed = true;
            let chunk = &mut self.chunks[key];
            match result {
                Ok(Some(state)) => chunk.state = state,
                Ok(None) => {
                    chunk.at += 1;
                    chunk.state = ChunkState::Ready;
                }
                Err(e) => {
                    self.end_chunk(key, Err(e));
                    return true;
                }
            }
        }
    }

    /// Starts the copy between local memory and the local slot.
    fn copy(&mut self, key: usize) -> Result<ChunkState, DomainError> {
        let chunk = &self.chunks[key];
        let job = &self.jobs[chunk.job];
        let (Some(slot), Some(own), Some(region)) = (chunk.local_slot, &mut self.own, &job.local)
        else {
            return Err(DomainError::Refused("a copy without staging memory".into()));
        };
        own.memory.pin_for(&region.location);
        let inward = !job.write;
        let at = own.memory.base() + slot_offset(slot) as usize;
        let pieces = local_pieces(&chunk.data, at, inward);
        // SAFETY: the pieces lie in a region that the request keeps registered until its token
        // completes, which needs this chunk, and in a slot that belongs to this chunk.
        let copy =
            unsafe { self.copier.start(&region.location, inward, &pieces) }.map_err(copy_error)?;
        Ok(ChunkState::Copying(copy))
    }

    /// Posts the chunk's transfer; a slot replaces each staged side.
    fn post_chunk(&mut self, key: usize) -> Result<Post, DomainError> {
        let chunk = &self.chunks[key];
        let token = Token { slot: key as u32, serial: chunk.serial, part: STAGED_PART };
        if chunk.stage() == Some(Stage::Count) {
            let Some(count) = chunk.count else { return Ok(Post::Done) };
            return self.inner.post(chunk.link, token, &WorkRequest::Count(count));
        }
        let mut data = chunk.data.clone();
        let packed = |slot| Seq::Strided { offset: slot_offset(slot), stride: data.page_len };
        let (local_slot, remote_slot) =
            (chunk.local_slot.map(packed), chunk.remote_slot.map(|(_, slot)| packed(slot)));
        if let (Some(seq), Some(own)) = (local_slot, &self.own) {
            data.local = LocalAddr(own.memory.base());
            data.local_region = FIRST_INTERNAL_INDEX;
            data.local_seq = seq;
        }
        if let (Some(seq), Some((window, _))) = (remote_slot, chunk.remote_slot) {
            data.remote = window;
            data.remote_keys = RailKeys::default();
            data.remote_seq = seq;
        }
        if chunk.local_slot.is_some() && chunk.remote_slot.is_some() {
            // Pages are adjacent at both ends: one page.
            data.page_len *= u64::from(data.pages);
            data.pages = 1;
        }
        let wr = match self.jobs[chunk.job].write {
            // If the peer copies from its window, the count follows that copy.
            true => WorkRequest::Write {
                data,
                count: chunk.count.filter(|_| chunk.remote_slot.is_none()),
            },
            false => WorkRequest::Read { data },
        };
        self.inner.post(chunk.link, token, &wr)
    }

    /// Requests the peer to copy between its window and its region.
    fn request_copy(&mut self, key: usize) {
        let chunk = &self.chunks[key];
        let Some((_, slot)) = chunk.remote_slot else { return };
        let frame = Frame::CopyRequest {
            slot,
            chunk: u64::from(chunk.serial) << 32 | key as u64,
            pages: Pages::remote(&chunk.data),
            inward: self.jobs[chunk.job].write,
            count: chunk.count.map(|c| (c.imm, c.n)),
        };
        self.inner.send_control(chunk.link, frame.encode());
    }

    /// The transport has completed a staged transfer.
    pub(super) fn on_transfer_done(&mut self, token: Token, result: Result<(), DomainError>) {
        let key = token.slot as usize;
        if self.chunks.get(key).is_none_or(|c| c.serial != token.serial) {
            return;
        }
        self.on_stage_done(key, result);
    }

    /// The peer has completed a copy, or refused it.
    pub(super) fn on_copy_done(
        &mut self,
        link: LinkId,
        chunk: u64,
        result: Result<(), Refusal>,
    ) -> Result<(), DomainError> {
        let (key, serial) = ((chunk & 0xFFFF_FFFF) as usize, (chunk >> 32) as u32);
        let asked = |c: &&Chunk| {
            let waits =
                matches!(c.state, ChunkState::Waiting) && c.stage() == Some(Stage::RemoteCopy);
            c.link == link && c.serial == serial && waits
        };
        if self.chunks.get(key).filter(asked).is_none() {
            return Err(DomainError::Handshake("an answer without a request".into()));
        }
        self.on_stage_done(key, result.map_err(Refusal::into_error));
        Ok(())
    }

    fn on_stage_done(&mut self, key: usize, result: Result<(), DomainError>) {
        match result {
            Ok(()) => {
                let chunk = &mut self.chunks[key];
                chunk.at += 1;
                chunk.state = ChunkState::Ready;
                self.advance(key);
            }
            Err(e) => self.end_chunk(key, Err(e)),
        }
    }

    /// Ends a chunk, and its job if it was the last.
    fn end_chunk(&mut self, key: usize, result: Result<(), DomainError>) {
        let chunk = self.chunks.remove(key);
        if let (Some(slot), Some(own)) = (chunk.local_slot, &mut self.own) {
            own.free.push(slot);
        }
        let state = self.link_states.get_mut(&chunk.link);
        if let (
            Some((_, slot)),
            Some(LinkState { peer_window: PeerWindow::Open { free, .. }, .. }),
        ) = (chunk.remote_slot, state)
        {
            free.push(slot);
        }
        let job = &mut self.jobs[chunk.job];
        job.running -= 1;
        if let Err(e) = result {
            job.error.get_or_insert(e);
        }
        if job.error.is_some() {
            self.unqueue(chunk.link, chunk.job);
        }
        self.finish_job(chunk.job);
    }

    /// Finishes a job whose chunks have ended; a job with several chunks is counted first (IC-1,
    /// IC-2).
    fn finish_job(&mut self, key: usize) {
        let job = &mut self.jobs[key];
        if !job.is_over() {
            return;
        }
        let link = job.link;
        if let (Some(count), None) = (job.count.take(), &job.error) {
            job.running += 1;
            let data = Data { pages: 0, ..job.data.clone() };
            return self.start(Chunk {
                job: key,
                link,
                serial: 0,
                data,
                stages: smallvec![Stage::Count],
                at: 0,
                state: ChunkState::Ready,
                count: Some(count),
                local_slot: None,
                remote_slot: None,
            });
        }
        let Job { token, error, .. } = self.jobs.remove(key);
        if let Some(state) = self.link_states.get_mut(&link) {
            state.jobs -= 1;
        }
        self.completions.push(Completion::Done { link, token, result: error.map_or(Ok(()), Err) });
    }

    /// A link is lost: chunks without a running copy fail now, `close_lost_links` waits for the
    /// others.
    pub(super) fn link_lost(&mut self, link: LinkId, cause: &DomainError) {
        if let Some(state) = self.link_states.get_mut(&link) {
            state.closing = Some(cause.clone());
            state.queue.clear();
        }
        let of_link = self.jobs.iter_mut().filter(|(_, job)| job.link == link);
        let jobs: Vec<usize> = of_link
            .map(|(key, job)| {
                job.error.get_or_insert(cause.clone());
                key
            })
            .collect();
        let still = self.chunks.iter().filter(|(_, c)| c.link == link && !c.is_copying());
        for key in still.map(|(key, _)| key).collect::<Vec<_>>() {
            self.end_chunk(key, Err(cause.clone()));
        }
        for key in jobs {
            if self.jobs.contains(key) {
                self.finish_job(key);
            }
        }
    }

    /// Closes lost links whose last copy has ended (not earlier, MR-1).
    pub(super) fn close_lost_links(&mut self) {
        let over = |(link, state): (&LinkId, &LinkState)| {
            let copies = self.window_copies.iter().any(|l| l.link == *link);
            (state.closing.is_some() && state.jobs == 0 && !copies).then_some(*link)
        };
        let links: SmallVec<[LinkId; 4]> = self.link_states.iter().filter_map(over).collect();
        for link in links {
            let Some(state) = self.link_states.remove(&link) else { continue };
            if let Some(window) = state.window {
                self.release_window(window);
            }
            if let Some(cause) = state.closing {
                self.completions.push(Completion::LinkDown {
                    link,
                    cause,
                    receipt: state.receipt,
                    // Staged work has no numbers: it isn't sent again.
                    unfinished: state.unfinished,
                });
            }
        }
    }
}
