//! Writes computed and unsent pages to every rank of the decoder that needs them.

use std::sync::{atomic::Ordering::Relaxed, Arc};

use fabric_engine::{EngineError, Handle, Local, Op, Quiescence, Remote, Result, Submit, Time};

use super::{
    job::{Job, TailState},
    Inner, JobEvent,
};
use crate::{
    pairing::RequestError,
    terms::Cause,
    wire::{reason, RequestState},
};

impl Inner {
    /// Sends the unsent cells of one layer, of which `tokens_done` tokens were computed at
    /// `computed`.
    pub(super) fn push(
        self: &Arc<Self>,
        job: &Arc<Job>,
        step: usize,
        tokens_done: u64,
        computed: Time,
    ) {
        let Some((group, layer)) = job.info.steps[step] else { return };
        let mut handles = Vec::new();
        let mut failed = None;
        {
            let mut progress = job.state.lock();
            let Some(local_pages) =
                progress.local_pages.clone().filter(|_| progress.stop.is_none())
            else {
                return;
            };
            let first = progress.sent[step];
            let ready = job.info.pairing.ready(group, tokens_done.min(job.tokens), job.tokens);
            let end = ready.map_or(first, |end| end.min(job.cells[group].end));
            if end <= first {
                return;
            }
            progress.sent[step] = end;
            job.timeline.computed(step, computed);
            for (number, route) in job.links.iter().enumerate() {
                let granted = &job.info.grants[route.to];
                let rank = &self.local[route.from];
                let selected = progress.select(job, number, group, &(first..end), &local_pages);
                let writes = selected.as_ref().map_err(RequestError::to_string).and_then(|s| {
                    Ok(s.writes(layer).map_err(|e| e.to_string())?.collect::<Vec<_>>())
                });
                let writes = match writes {
                    Ok(writes) => writes,
                    Err(why) => {
                        failed = Some(EngineError::Invalid(why));
                        break;
                    }
                };
                let imm = Some(job.counters[route.to]);
                let ops: Vec<Op<'_>> = writes
                    .iter()
                    .map(|w| Op::WritePages {
                        page_len: w.nbytes,
                        src: &rank.buffers[w.src_buffer as usize],
                        src_pages: &w.src_pages,
                        dst: &granted.buffers[route.from][w.dst_buffer as usize],
                        dst_pages: &w.dst_pages,
                        imm,
                    })
                    .collect();
                if ops.is_empty() {
                    continue;
                }
                let posted = job.timeline.posted(step);
                match rank.engine.submit_timed(&ops, Submit::default(), posted) {
                    Ok(handle) => handles.push(progress.track(handle, Some(step))),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            if failed.is_none() {
                // Other processes send all of this layer.
                if progress.open[step] == 0 {
                    let now = self.control().now();
                    job.timeline.posted(step).store(now.0, Relaxed);
                    job.timeline.delivered(step, now);
                }
            }
        }
        self.watch_writes(job, handles);
        match failed {
            Some(error) => self.write_failed(job, &error),
            None => self.settle(job),
        }
    }

    pub(super) fn push_tail(self: &Arc<Self>, job: &Arc<Job>, slot: u32) -> Result<()> {
        let nbytes = self.terms.tail_nbytes;
        let mut handles = Vec::new();
        let mut failed = None;
        {
            let mut progress = job.state.lock();
            if progress.stop.is_some() {
                return Ok(());
            }
            if progress.tail == TailState::Sent || progress.local_pages.is_none() {
                let what = "a request is finished once, after it was accepted";
                return Err(EngineError::Invalid(what.into()));
            }
            if let Some(region) = self.tail().filter(|_| nbytes > 0) {
                let offset = u64::from(slot).saturating_mul(nbytes);
                if offset.checked_add(nbytes).is_none_or(|end| end > region.len()) {
                    return Err(EngineError::Invalid(format!("there is no slot {slot} for tails")));
                }
                if let Some(there) = &job.info.grants[0].tail {
                    let op = Op::Write {
                        src: Local { region, offset },
                        dst: Remote { region: there, offset: u64::from(job.tail_slot) * nbytes },
                        len: nbytes,
                        imm: Some(job.counters[0]),
                    };
                    match self.local[0].engine.submit(&[op], Submit::default()) {
                        Ok(handle) => handles.push(progress.track(handle, None)),
                        Err(error) => failed = Some(error),
                    }
                }
            }
            progress.tail = TailState::Sent;
        }
        self.watch_writes(job, handles);
        match failed {
            Some(error) => self.write_failed(job, &error),
            None => self.settle(job),
        }
        Ok(())
    }

    /// Follows writes: their results, and their quiescence.
    fn watch_writes(self: &Arc<Self>, job: &Arc<Job>, handles: Vec<(u64, Handle)>) {
        for (number, handle) in handles {
            // Both callbacks keep this prefiller until the write has ended, so that the caller
            // learns of it even after it dropped the prefiller.
            let (inner, theirs) = (Arc::clone(self), Arc::clone(job));
            handle.on_done(move |result| {
                match result {
                    Ok(()) => inner.delivered(&theirs, number),
                    Err(error) => inner.write_failed(&theirs, &error),
                }
                theirs.state.lock().update(number, |write| write.done = true);
                inner.settle(&theirs);
            });
            let (inner, theirs) = (Arc::clone(self), Arc::clone(job));
            handle.on_quiesced(move |quiescence| {
                {
                    let mut progress = theirs.state.lock();
                    progress.unproven |= quiescence == Quiescence::Unknown;
                    progress.update(number, |write| write.quiesced = true);
                }
                if quiescence == Quiescence::Unknown {
                    inner.end_unproven(&theirs);
                }
                inner.settle(&theirs);
            });
        }
    }

    /// Ends the session of a job whose writes may still land. The links are lost, so local memory is
    /// not in use. The decoder must make sure of its own memory (MR-1).
    fn end_unproven(self: &Arc<Self>, job: &Job) {
        let why = "links broke, and what was on them may still land";
        self.end_session((job.key.0, job.key.1), why, true);
    }

    fn delivered(&self, job: &Job, number: u64) {
        let mut progress = job.state.lock();
        if let Some(step) = progress.delivered(number) {
            job.timeline.delivered(step, self.control().now());
        }
    }

    fn write_failed(self: &Arc<Self>, job: &Arc<Job>, error: &EngineError) {
        if matches!(error, EngineError::Cancelled { .. }) {
            return;
        }
        let cause = Cause::Lost(format!("decoder {}: {error}", job.info.name));
        self.stop(job, RequestState::Failed(reason(&error.to_string())), Some(cause));
        let stale = matches!(error, EngineError::Stale { .. });
        let lost = matches!(error, EngineError::PeerLost { .. } | EngineError::Unreachable { .. });
        if stale || lost {
            self.end_session((job.key.0, job.key.1), &error.to_string(), stale);
        }
    }

    /// Stops sending a job, and ends it when its writes are over. `cause` is the reason for the
    /// engine behind the prefiller.
    pub(super) fn stop(self: &Arc<Self>, job: &Arc<Job>, at: RequestState, cause: Option<Cause>) {
        let under_way: Vec<Handle> = {
            let mut progress = job.state.lock();
            if progress.stop.is_some() || progress.over {
                return;
            }
            progress.stop = Some(at);
            if let Some(cause) = cause {
                self.events.push(job.id, JobEvent::Stopped(cause));
            }
            progress.under_way.values().map(|write| write.handle.clone()).collect()
        };
        self.events.report();
        under_way.iter().for_each(Handle::cancel);
        self.settle(job);
    }

    /// Ends a job if nothing is left to do or under way.
    pub(super) fn settle(self: &Arc<Self>, job: &Arc<Job>) {
        let at = {
            let mut progress = job.state.lock();
            let Some(at) = job.ended(&progress) else { return };
            progress.over = true;
            // If quiescence is unknown, no state is sent (MR-1), and the decoder revokes its
            // memory.
            (!progress.unproven).then_some(at)
        };
        if at.is_none() {
            // First, because a session without the job would confirm a cancellation of it.
            self.end_unproven(job);
        }
        let (from, number, seq) = job.key;
        let peer = {
            let mut state = self.state.lock();
            state.jobs.remove(&job.id);
            state.entries -= job.entries;
            state.payloads -= job.payload_nbytes;
            let session = state.sessions.get_mut(&(from, number));
            let session = session.filter(|m| m.info.incarnation == job.info.incarnation);
            session.and_then(|session| {
                session.jobs.remove(&seq);
                let at = at?;
                if seq >= session.floor {
                    session.ended.insert(seq, at.clone());
                }
                Some((session.info.clone(), at))
            })
        };
        if let Some((info, at)) = peer {
            self.send_states(number, &info, vec![(seq, at)]);
        }
        self.events.push(job.id, JobEvent::Released);
        self.events.report();
    }
}
