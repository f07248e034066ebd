//! The requesting side: jobs and their chunks.

use smallvec::{smallvec, SmallVec};

use super::{
    job::{stages, Chunk, Far, Job, Own, Stage, State, OWN},
    wire::{local_pieces, refused, slot_offset, Frame, Pages, Refusal, WINDOW_BYTES},
    Side, Staged, Whispers, MAX_JOBS, SLOTS,
};
use crate::{
    api::{RailKeys, RegionKey},
    domain::{Completion, Data, DomainError, LinkId, LocalAddr, Post, Seq, Token, WorkRequest},
    memory::{device::Pinned, HIDDEN},
};

impl<D: Whispers> Staged<D> {
    pub(super) fn begin(
        &mut self,
        link: LinkId,
        _token: Token,
        job: Job,
    ) -> Result<Post, DomainError> {
        let side = self.sides.entry(link).or_default();
        if let Some(cause) = &side.closing {
            return Err(cause.clone());
        }
        if side.jobs >= MAX_JOBS {
            return Ok(Post::Full);
        }
        side.device |= job.touches_device();
        side.file |= job.touches_file();
        side.host |= !job.touches_device() && !job.touches_file();
        side.jobs += 1;
        let key = self.jobs.insert(job);
        side.queue.push_back(key);
        self.pump(link);
        if !self.news.is_empty() {
            self.lanes.wake();
        }
        Ok(Post::Queued)
    }

    pub(super) fn ask_for_window(&mut self, link: LinkId) {
        let side = self.sides.entry(link).or_default();
        if matches!(side.far, Far::Unknown) {
            side.far = Far::Asked;
            self.inner.whisper(link, Frame::Open.encode());
        }
    }

    pub(super) fn window_opened(
        &mut self,
        link: LinkId,
        key: RegionKey,
    ) -> Result<(), DomainError> {
        let Some(side) = self.sides.get_mut(&link) else { return Ok(()) };
        if !matches!(side.far, Far::Asked) || key.index & HIDDEN == 0 {
            return Err(DomainError::Handshake("a window without a request".into()));
        }
        side.far = Far::Open { key, free: (0..SLOTS).collect() };
        self.pump(link);
        Ok(())
    }

    pub(super) fn pump_all(&mut self) -> bool {
        let waiting = self.sides.iter().filter(|(_, s)| !s.queue.is_empty());
        let links: SmallVec<[LinkId; 8]> = waiting.map(|(link, _)| *link).collect();
        links.into_iter().fold(false, |moved, link| self.pump(link) | moved)
    }

    /// Starts as many chunks of a link as there are slots for.
    fn pump(&mut self, link: LinkId) -> bool {
        let mut moved = false;
        while let Some(key) = self.sides.get(&link).and_then(|s| s.queue.front().copied()) {
            let job = &self.jobs[key];
            if job.error.is_some() {
                self.unqueue(link, key);
                continue;
            }
            let (local, remote) = (job.local.is_some(), job.remote);
            if remote {
                self.ask_for_window(link);
            }
            let Some((near, far)) = self.take_slots(link, local, remote, key) else { break };
            moved = true;
            let job = &mut self.jobs[key];
            let data = job.cut.nth(&job.data, job.next);
            let count = job.count.take_if(|_| job.cut.chunks == 1);
            let stages = stages(job.write, local, remote);
            job.next += 1;
            job.running += 1;
            if job.next == job.cut.chunks {
                self.unqueue(link, key);
            }
            self.start(Chunk {
                job: key,
                link,
                serial: 0,
                data,
                stages,
                at: 0,
                state: State::Ready,
                count,
                near,
                far,
            });
        }
        moved
    }

    fn unqueue(&mut self, link: LinkId, job: usize) {
        if let Some(side) = self.sides.get_mut(&link) {
            side.queue.retain(|k| *k != job);
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
            match Pinned::new(WINDOW_BYTES, self.device) {
                Ok(memory) => self.own = Some(Own { memory, free: (0..SLOTS).collect() }),
                Err(e) => {
                    self.jobs[job].error = Some(e);
                    self.unqueue(link, job);
                    self.finish(job);
                    return None;
                }
            }
        }
        let side = self.sides.get_mut(&link)?;
        let mut own = self.own.as_mut().filter(|_| local);
        if own.as_ref().is_some_and(|own| own.free.is_empty()) {
            return None;
        }
        let far = match &mut side.far {
            _ if !remote => None,
            Far::Open { key, free } => Some((*key, free.pop()?)),
            _ => return None,
        };
        Some((own.as_mut().and_then(|own| own.free.pop()), far))
    }

    fn start(&mut self, mut chunk: Chunk) {
        self.serial = self.serial.wrapping_add(1);
        chunk.serial = self.serial;
        let key = self.chunks.insert(chunk);
        self.advance(key);
    }

    /// Advances chunks that wait for a copy engine, or for room in the transport.
    pub(super) fn step_chunks(&mut self) -> bool {
        let due = self.chunks.iter().filter(|(_, c)| !matches!(c.state, State::Waiting));
        let due: SmallVec<[usize; 16]> = due.map(|(key, _)| key).collect();
        due.into_iter().fold(false, |moved, key| self.advance(key) | moved)
    }

    /// Advances a chunk as far as possible; false if it did not move.
    fn advance(&mut self, key: usize) -> bool {
        let mut moved = false;
        loop {
            let Some(chunk) = self.chunks.get(key) else { return moved };
            let result = match (&chunk.state, chunk.stage()) {
                (_, None) => {
                    self.drop_chunk(key, Ok(()));
                    return true;
                }
                (State::Waiting, _) => return moved,
                (State::Copying(ticket), _) => match self.lanes.poll(ticket) {
                    None => return moved,
                    Some(result) => result.map(|()| None),
                },
                (State::Ready, Some(Stage::Copy)) => self.copy(key).map(Some),
                (State::Ready, Some(Stage::Ask)) => {
                    self.ask(key);
                    Ok(Some(State::Waiting))
                }
                (State::Ready, Some(Stage::Wire | Stage::Count)) => match self.post_chunk(key) {
                    Ok(Post::Done) => Ok(None),
                    Ok(Post::Queued) => Ok(Some(State::Waiting)),
                    Ok(Post::Full) => return moved,
                    Err(e) => Err(e),
                },
            };
            moved = true;
            let chunk = &mut self.chunks[key];
            match result {
                Ok(Some(state)) => chunk.state = state,
                Ok(None) => {
                    chunk.at += 1;
                    chunk.state = State::Ready;
                }
                Err(e) => {
                    self.drop_chunk(key, Err(e));
                    return true;
                }
            }
        }
    }

    /// Starts the copy between local memory and the local slot.
    fn copy(&mut self, key: usize) -> Result<State, DomainError> {
        let chunk = &self.chunks[key];
        let job = &self.jobs[chunk.job];
        let (Some(slot), Some(own), Some(region)) = (chunk.near, &self.own, &job.local) else {
            return Err(DomainError::Refused("a copy without staging memory".into()));
        };
        let inward = !job.write;
        let at = own.memory.base() + slot_offset(slot) as usize;
        let pieces = local_pieces(&chunk.data, at, inward);
        // SAFETY: the pieces lie in a region that the request keeps registered until its token
        // completes, which needs this chunk, and in a slot that belongs to this chunk.
        let ticket =
            unsafe { self.lanes.start(&region.location, inward, &pieces) }.map_err(refused)?;
        Ok(State::Copying(ticket))
    }

    /// Posts the chunk's transfer; a slot replaces each staged side.
    fn post_chunk(&mut self, key: usize) -> Result<Post, DomainError> {
        let chunk = &self.chunks[key];
        let token = Token { slot: key as u32, serial: chunk.serial, part: OWN };
        if chunk.stage() == Some(Stage::Count) {
            let Some(count) = chunk.count else { return Ok(Post::Done) };
            return self.inner.post(chunk.link, token, &WorkRequest::Count(count));
        }
        let mut data = chunk.data.clone();
        let packed = |slot| Seq::Strided { offset: slot_offset(slot), stride: data.page_len };
        let (near, far) = (chunk.near.map(packed), chunk.far.map(|(_, slot)| packed(slot)));
        if let (Some(seq), Some(own)) = (near, &self.own) {
            data.local = LocalAddr(own.memory.base());
            data.local_region = HIDDEN;
            data.local_seq = seq;
        }
        if let (Some(seq), Some((window, _))) = (far, chunk.far) {
            data.remote = window;
            data.remote_keys = RailKeys::default();
            data.remote_seq = seq;
        }
        if chunk.near.is_some() && chunk.far.is_some() {
            // Pages are adjacent at both ends: one page.
            data.page_len *= u64::from(data.pages);
            data.pages = 1;
        }
        let wr = match self.jobs[chunk.job].write {
            // If the peer copies from its window, the count follows that copy.
            true => WorkRequest::Write { data, count: chunk.count.filter(|_| chunk.far.is_none()) },
            false => WorkRequest::Read { data },
        };
        self.inner.post(chunk.link, token, &wr)
    }

    /// Requests the peer to copy between its window and its region.
    fn ask(&mut self, key: usize) {
        let chunk = &self.chunks[key];
        let Some((_, slot)) = chunk.far else { return };
        let frame = Frame::Move {
            slot,
            chunk: u64::from(chunk.serial) << 32 | key as u64,
            pages: Pages::remote(&chunk.data),
            inward: self.jobs[chunk.job].write,
            count: chunk.count.map(|c| (c.imm, c.n)),
        };
        self.inner.whisper(chunk.link, frame.encode());
    }

    /// The transport has completed a staged transfer.
    pub(super) fn wired(&mut self, token: Token, result: Result<(), DomainError>) {
        let key = token.slot as usize;
        if self.chunks.get(key).is_none_or(|c| c.serial != token.serial) {
            return;
        }
        self.passed(key, result);
    }

    /// The peer has completed a copy, or refused it.
    pub(super) fn moved(
        &mut self,
        link: LinkId,
        chunk: u64,
        result: Result<(), Refusal>,
    ) -> Result<(), DomainError> {
        let (key, serial) = ((chunk & 0xFFFF_FFFF) as usize, (chunk >> 32) as u32);
        let asked = |c: &&Chunk| {
            let waits = matches!(c.state, State::Waiting) && c.stage() == Some(Stage::Ask);
            c.link == link && c.serial == serial && waits
        };
        if self.chunks.get(key).filter(asked).is_none() {
            return Err(DomainError::Handshake("an answer without a request".into()));
        }
        self.passed(key, result.map_err(Refusal::into_error));
        Ok(())
    }

    fn passed(&mut self, key: usize, result: Result<(), DomainError>) {
        match result {
            Ok(()) => {
                let chunk = &mut self.chunks[key];
                chunk.at += 1;
                chunk.state = State::Ready;
                self.advance(key);
            }
            Err(e) => self.drop_chunk(key, Err(e)),
        }
    }

    /// Ends a chunk, and its job if it was the last.
    fn drop_chunk(&mut self, key: usize, result: Result<(), DomainError>) {
        let chunk = self.chunks.remove(key);
        if let (Some(slot), Some(own)) = (chunk.near, &mut self.own) {
            own.free.push(slot);
        }
        let side = self.sides.get_mut(&chunk.link);
        if let (Some((_, slot)), Some(Side { far: Far::Open { free, .. }, .. })) = (chunk.far, side)
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
        self.finish(chunk.job);
    }

    /// Finishes a job whose chunks have ended; a job with several chunks is counted first (IC-1,
    /// IC-2).
    fn finish(&mut self, key: usize) {
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
                state: State::Ready,
                count: Some(count),
                near: None,
                far: None,
            });
        }
        let Job { token, error, .. } = self.jobs.remove(key);
        if let Some(side) = self.sides.get_mut(&link) {
            side.jobs -= 1;
        }
        self.news.push(Completion::Done { link, token, result: error.map_or(Ok(()), Err) });
    }

    /// A link is lost: chunks without a running copy fail now, `bury` waits for the others.
    pub(super) fn link_lost(&mut self, link: LinkId, cause: &DomainError) {
        if let Some(side) = self.sides.get_mut(&link) {
            side.closing = Some(cause.clone());
            side.queue.clear();
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
            self.drop_chunk(key, Err(cause.clone()));
        }
        for key in jobs {
            if self.jobs.contains(key) {
                self.finish(key);
            }
        }
    }

    /// Closes lost links whose last copy has ended (not earlier, MR-1).
    pub(super) fn bury(&mut self) {
        let over = |(link, side): (&LinkId, &Side)| {
            let copies = self.landings.iter().any(|l| l.link == *link);
            (side.closing.is_some() && side.jobs == 0 && !copies).then_some(*link)
        };
        let links: SmallVec<[LinkId; 4]> = self.sides.iter().filter_map(over).collect();
        for link in links {
            let Some(side) = self.sides.remove(&link) else { continue };
            if let Some(window) = side.window {
                self.shut_window(window);
            }
            if let Some(cause) = side.closing {
                self.news.push(Completion::LinkDown {
                    link,
                    cause,
                    receipt: side.receipt,
                    // Staged work has no numbers: it isn't sent again.
                    unfinished: side.unfinished,
                });
            }
        }
    }
}
