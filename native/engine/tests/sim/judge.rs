//! The checks of a run, after every step and at the end.

use fabric_engine::EngineError;

use crate::{
    case::{Ns, MS, US},
    check::{broken, is_quiesced, Checked},
    run::{Incarnation, Run},
};

/// How much later than its deadline an operation may end.
const SLACK: Ns = US;
/// Time after which peers must know that an incarnation has ended, beside the peer timeout.
const LOSS: Ns = 20 * MS;

impl Run<'_> {
    /// Checks all pending operations and counters; called after every step.
    pub fn check(&mut self) -> Checked {
        let now = self.net.now().0;
        for i in 0..self.transfers.len() {
            let t = &self.transfers[i];
            if t.over {
                continue;
            }
            match t.handle.poll() {
                Some(result) => {
                    self.transfers[i].over = true;
                    self.transfer_over(i, result)?;
                }
                None if now > t.deadline.saturating_add(SLACK) => {
                    return broken(
                        "IC-4",
                        now,
                        format!("{} has passed its deadline", t.handle.op()),
                    );
                }
                None if t.to.iter().all(|to| self.should_be_lost(Some(*to), t.since)) => {
                    let what = format!("{} waits for a peer that has ended", t.handle.op());
                    return broken("RS-4", now, what);
                }
                None => {}
            }
        }
        for count in &mut self.counts {
            count.check(now, &mut self.incarnations[count.incarnation].memory)?;
        }
        for i in 0..self.waits.len() {
            let w = &self.waits[i];
            if w.over {
                continue;
            }
            match w.handle.poll() {
                Some(result) => {
                    self.waits[i].over = true;
                    self.wait_over(i, result)?;
                }
                None if now > w.deadline.saturating_add(SLACK) => {
                    return broken("IC-4", now, "an expectation has passed its deadline");
                }
                None if self.should_be_lost(w.writer, w.since) => {
                    return broken("RS-4", now, "an expectation waits for a peer that has ended");
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Whether this incarnation has ended so long ago that an operation pending since `since` must
    /// have failed.
    fn should_be_lost(&self, incarnation: Option<usize>, since: Ns) -> bool {
        let ended = incarnation.and_then(|l| self.incarnations[l].ended);
        let known = |at: Ns| at.max(since) + LOSS + 6 * self.case.shape.peer_timeout;
        ended.is_some_and(|at| self.net.now().0 > known(at))
    }

    fn transfer_over(&mut self, at: usize, result: Result<(), EngineError>) -> Checked {
        let now = self.net.now().0;
        let t = &self.transfers[at];
        match &result {
            Ok(()) => self.outcome.succeeded += 1,
            Err(_) => self.outcome.failed += 1,
        }
        if result.is_ok() {
            if t.old_key {
                return broken(
                    "MR-2",
                    now,
                    "a write with the key of an earlier incarnation succeeded",
                );
            }
            for (offset, bytes) in &t.targets {
                let region = &self.incarnations[t.incarnation].memory.region;
                if !region.with_bytes(*offset, bytes.len() as u64, |b| b == bytes).unwrap() {
                    return broken("RS-1", now, "a read succeeded without all of its bytes");
                }
            }
        }
        let quiesced = is_quiesced(&result);
        // Slices at a peer that did not confirm may still land; only success or a quiesced timeout
        // excludes that.
        let settled = matches!(result, Ok(()) | Err(EngineError::Timeout { quiesced: true, .. }));
        for u in &t.units {
            let memory = &mut self.incarnations[u.incarnation].memory;
            if let Some(landing) = u.landing {
                if result.is_ok() && !memory.is_whole(landing) {
                    return broken("RS-1", now, "a write succeeded and its bytes are not there");
                }
                if settled {
                    memory.end_landing(landing);
                }
            }
            if let Some(count) = u.count {
                let count = &mut self.counts[count];
                match &result {
                    Ok(()) => count.succeeded += 1,
                    Err(_) => count.failed += 1,
                }
            }
        }
        let memory = &self.incarnations[t.incarnation].memory;
        if quiesced {
            t.sources.iter().for_each(|(offset, len)| memory.end_source(*offset, *len));
            t.targets.iter().for_each(|(offset, b)| memory.end_target(*offset, b.len() as u64));
        }
        self.transfers[at].targets.retain(|_| quiesced);
        let t = &self.transfers[at];
        if self.must_succeed
            && !t.hurried
            && !t.pinned
            && (t.message.is_none() || !self.messages_may_fail)
        {
            if let Err(e) = result {
                let what = format!("{} failed where a spare rail was left: {e}", t.handle.op());
                return broken("IC-4", now, what);
            }
        }
        Ok(())
    }

    fn wait_over(&mut self, at: usize, result: Result<(), EngineError>) -> Checked {
        let now = self.net.now().0;
        let w = &self.waits[at];
        let count = &mut self.counts[w.count];
        let Some(counter) = &count.counter else { return Ok(()) };
        match result {
            Ok(()) => {
                self.outcome.met += 1;
                count.taken += u64::from(w.n);
                if count.taken > counter.arrived() {
                    let what = format!("{} met of {} counted", count.taken, counter.arrived());
                    return broken("IC-2", now, what);
                }
            }
            Err(e) => {
                self.outcome.unmet += 1;
                // Expectations that fail at the same time don't pass on their arrivals.
                let first = count.given_up != Some(now);
                count.given_up = Some(now);
                let enough = counter.unclaimed() >= u64::from(w.n);
                if enough && first && e != EngineError::Closed {
                    return broken("IC-5", now, format!("enough had arrived: {e}"));
                }
                if matches!(e, EngineError::PeerLost { .. }) && w.writer.is_none() {
                    return broken("IC-4", now, format!("no writer was named: {e}"));
                }
            }
        }
        Ok(())
    }

    /// Checks the final state, when nothing is under way.
    pub fn check_end(&mut self) -> Checked {
        let now = self.net.now().0;
        let alive = |incarnations: &[Incarnation], incarnation: usize| {
            incarnations[incarnation].engine.is_some()
        };
        for count in self.counts.iter().filter(|c| alive(&self.incarnations, c.incarnation)) {
            count.check_end(now)?;
        }
        for incarnation in &self.incarnations {
            if let Some((promise, what)) = incarnation.memory.wrong() {
                return broken(promise, now, what);
            }
        }
        for t in &self.transfers {
            let memory = &self.incarnations[t.incarnation].memory;
            let same = |(at, b): &(u64, Vec<u8>)| memory.target_is_untouched(*at, b.len() as u64);
            if !t.targets.iter().all(same) {
                return broken("MR-1", now, "the target of a read changed after it was over");
            }
        }
        for t in &self.transfers {
            let Some(message) = t.message else { continue };
            let (n, ok) = (self.messages.lock()[message], t.handle.poll() == Some(Ok(())));
            let alive = alive(&self.incarnations, self.sent_to[message]);
            if n > 1 || (ok && n == 0 && alive) {
                return broken(
                    "RS-1",
                    now,
                    format!("a message was delivered {n} times, reported as taken: {ok}"),
                );
            }
        }
        Ok(())
    }
}
