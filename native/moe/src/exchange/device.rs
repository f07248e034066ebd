//! An exchange that kernels execute: what they may read, and the effects of their commands.
//!
//! The device takes the caller's part of the exchange. It reports by commands, in order, and waits
//! for words in between; no host call stands between two kernels. State and wire format are those
//! of a caller's exchange. So ranks with and without kernels take part in one exchange. A lost rank
//! is masked: the device's wait then ends without it.

use std::{sync::Arc, time::Duration};

use fabric_engine::{EngineError, Result};

use super::{
    act::Act,
    link::{Answer, Link, Lot},
    state::State,
    stores::{AnswersThere, Stays},
    waits::Until,
};
use crate::{
    device::{turns, Listed, Said, Shared, Told, Word, BLANK},
    phase::Phase,
    routes::{Order, Placing, Routes},
    shape::Shape,
};

/// The device's part of an exchange.
#[derive(Debug)]
pub struct Device {
    shared: Shared,
    /// Turns of rows and of answers in each exchange.
    turns: (u64, u64),
    /// The exchange that it is in, from 1.
    exchange: u64,
    /// It was told that its rows may be written.
    may_begin: bool,
    /// Its routes, while the exchange before has something left to do.
    begins: Option<Routes>,
    packed: bool,
    /// What it may know of this exchange.
    routed: bool,
    answered: bool,
    lots: u64,
    lot: Option<(Vec<Lot>, bool)>,
    /// Ranks that were answered, counted from the one behind this, and rows of the next one that
    /// were.
    cursor: (u32, u64),
    answers: u64,
    leaving: Option<(Vec<(u32, Leaving)>, bool)>,
    /// It stores to peers' memory by itself, where it can.
    stores: bool,
    /// It waits for room for answers.
    combines: bool,
    /// Where it may be storing.
    stays: Stays,
    /// Ranks whose answers are missing in the last sums.
    left_out: Vec<u32>,
    /// The fault that the device found in tokens, until it is reported.
    fault: Option<String>,
    failed: Option<EngineError>,
}

/// Answers to a rank's rows.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// From the shared buffer.
    Sent(Answer),
    /// They are there, and so many counts are to follow.
    Stored(u32),
}

impl State {
    /// Tells the device what it may read now.
    pub fn advance(&mut self, acts: &mut Vec<Act>) {
        if let Some(mut device) = self.device.take() {
            device.advance(self, acts);
            self.device = Some(device);
        }
    }

    /// The device has done something. Returns where it stores no more, as [`Stays::over`] does.
    pub fn told(&mut self, said: Result<Said, String>, acts: &mut Vec<Act>) -> Stays {
        let Some(mut device) = self.device.take() else { return Stays::default() };
        let over = said.as_ref().map(|said| device.stays.over(said.told)).unwrap_or_default();
        if device.failed.is_none() {
            match said.and_then(Said::came).and_then(|told| device.told(self, told, acts)) {
                Ok(()) => device.advance(self, acts),
                Err(cause) => device.fail(self.gives_up(cause)),
            }
        }
        self.device = Some(device);
        if self.hangs_on_lost() {
            self.start_pulse(acts);
        }
        over
    }

    /// Whether the device waits for memory that lost ranks still hold.
    pub fn device_hangs(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.hangs(self))
    }

    /// Lost ranks have not let go of memory for so long, or never will, and the device can't go on
    /// without it.
    pub fn device_is_stuck(&mut self, after: Duration, cause: &str) {
        let error = self.not_quiet(after, cause);
        if let Some(device) = self.device.as_mut().filter(|d| d.failed.is_none()) {
            device.fail(error);
        }
    }

    /// Why a device that goes on without what it waited for can't.
    fn gives_up(&self, cause: String) -> EngineError {
        match self.holds(Until::Quiet) {
            true => EngineError::Cancelled { what: "exchange on the device", cause },
            false => self.not_quiet(Duration::ZERO, &cause),
        }
    }

    fn not_quiet(&self, after: Duration, cause: &str) -> EngineError {
        EngineError::NotQuiesced {
            what: "memory that goes to a lost rank, or comes from it,".into(),
            after,
            cause: format!(
                "ranks {:?} have not let go of it, and {} writes that failed are under way; {cause}",
                self.revoking, self.unsettled
            ),
        }
    }
}

impl Device {
    pub fn new(shared: Shared, shape: &Shape, stores: bool) -> Self {
        Self {
            shared,
            turns: turns(shape),
            exchange: 0,
            may_begin: true,
            begins: None,
            packed: false,
            routed: false,
            answered: false,
            lots: 0,
            lot: None,
            cursor: (0, 0),
            answers: 0,
            leaving: None,
            stores,
            combines: false,
            stays: Stays::default(),
            left_out: Vec::new(),
            fault: None,
            failed: None,
        }
    }

    /// Ranks whose answers are missing in the last sums.
    pub fn left_out(&self) -> Vec<u32> {
        self.left_out.clone()
    }

    /// The fault since the last call.
    ///
    /// # Errors
    /// That; for good if the device has left the exchange.
    pub fn check(&mut self) -> Result<()> {
        match (&self.failed, self.fault.take()) {
            (Some(failed), _) => Err(failed.clone()),
            (None, Some(fault)) => Err(EngineError::Invalid(fault)),
            (None, None) => Ok(()),
        }
    }

    /// Whether it stores to peers' memory by itself, where it can.
    pub fn stores(&self) -> bool {
        self.stores
    }

    /// It stores nothing any more. Returns where it did, as [`Stays::over`] does.
    #[must_use]
    pub fn settled(&mut self) -> Stays {
        std::mem::take(&mut self.stays)
    }

    /// Whether it may be storing there now.
    pub fn is_storing(&self) -> bool {
        !self.stays.is_empty()
    }

    /// Whether tokens of its wait for the exchange before to be over.
    pub fn begins(&self) -> bool {
        self.begins.is_some() && self.failed.is_none()
    }

    /// Whether rows are being handed out, and must stay where they are.
    pub fn hands_out(&self) -> bool {
        self.lot.is_some() && self.failed.is_none()
    }

    /// It goes on no more.
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    fn hangs(&self, s: &State) -> bool {
        let until = match s.phase {
            _ if self.failed.is_some() => return false,
            _ if self.begins.is_some() => Until::MayDispatch,
            Phase::Dispatched if self.routed && self.lot.is_none() => Until::Rows,
            Phase::Collected | Phase::Answering if self.awaits_room() => Until::AnswersLeft,
            Phase::Idle if !self.may_begin => Until::MayDispatch,
            _ => return false,
        };
        s.hangs_on_quiet(until)
    }

    /// Ends the exchange for the device, and every wait of it (RS-4).
    pub fn end(&mut self, cause: EngineError) {
        self.failed.get_or_insert(cause);
        self.shared.abort();
    }

    fn fail(&mut self, error: EngineError) {
        tracing::warn!(%error, "an exchange on a device was given up");
        self.end(error);
    }

    fn advance(&mut self, s: &mut State, acts: &mut Vec<Act>) {
        if self.failed.is_some() {
            return;
        }
        if self.begins.is_some() {
            if !s.holds(Until::MayDispatch) {
                return;
            }
            self.begin(s, acts);
        }
        match s.phase {
            Phase::Dispatched => {
                self.tell_routes(s);
                self.tell_rows(s);
            }
            Phase::Collected => {
                self.tell_room(s);
                self.tell_over(s, 2 * self.exchange);
            }
            Phase::Answering => self.tell_room(s),
            Phase::Answered => self.tell_answers(s),
            Phase::Idle => self.tell_over(s, 2 * self.exchange + 1),
        }
    }

    fn told(&mut self, s: &mut State, told: Told, acts: &mut Vec<Act>) -> Result<(), String> {
        match (told, s.phase) {
            (Told::Begun, Phase::Idle | Phase::Collected) if self.may_begin => {
                let (routes, fault) = self.shared.note(&s.shape).map_err(|e| e.to_string())?;
                if let Some(fault) = fault {
                    self.fault = Some(fault_text(fault, s.shape.topk));
                }
                self.begins = Some(routes);
                (self.packed, self.may_begin) = (false, false);
                self.exchange += 1;
            }
            (Told::Packed, _) if self.begins.is_some() => self.packed = true,
            (Told::Packed, Phase::Dispatched) => {
                self.packed = true;
                pack(s, acts);
            }
            (Told::Combining, Phase::Collected) => self.combines = true,
            (Told::HandedOut, Phase::Dispatched) => self.handed_out(s, acts)?,
            (Told::Answered, Phase::Collected | Phase::Answering) => self.put_answers(s, acts)?,
            // There were fewer turns than there could have been.
            (Told::HandedOut, Phase::Collected) | (Told::Answered, Phase::Answered) => {}
            (Told::Summed, Phase::Answered) if self.answered => s.phase = Phase::Idle,
            (told, phase) => return Err(gone_on(told, phase)),
        }
        Ok(())
    }

    fn begin(&mut self, s: &mut State, acts: &mut Vec<Act>) {
        self.shared.clear();
        (self.routed, self.answered, self.lots, self.answers) = (false, false, 0, 0);
        (self.lot, self.leaving, self.cursor) = (None, None, (0, 0));
        self.combines = false;
        s.begin(Arc::new(self.begins.take().unwrap_or_default()), acts);
        if self.packed {
            pack(s, acts);
        }
        if self.stores {
            let ways = s.ways(&mut self.stays);
            self.shared.put_ways(&ways);
            self.shared.set(Word::Ways, self.exchange);
        }
    }

    fn tell_over(&mut self, s: &State, value: u64) {
        if s.holds(Until::MayDispatch) {
            self.may_begin = true;
            self.shared.set(Word::Over, value);
        }
    }

    fn tell_routes(&mut self, s: &mut State) {
        if self.routed || !s.holds(Until::Routes) {
            return;
        }
        let incoming = s.incoming();
        self.shared.put_incoming(&incoming, s.shape.local_experts() as usize);
        match Placing::new(s.shape.local_experts(), incoming, Order::Packed { multiple: 1 }) {
            Ok(placing) => {
                s.placing = Some(Arc::new(placing));
                self.routed = true;
                self.shared.set(Word::Routes, self.exchange);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Once all has come that could be granted: then a turn is the last, or as large as the buffer.
    fn tell_rows(&mut self, s: &State) {
        let due = s.here().any(|l| l.inward.due > 0);
        let full = s.next_place == s.shape.shared_rows();
        let last = s.waiting.is_empty();
        if !self.routed || self.lot.is_some() || due || !(last || full) {
            return;
        }
        let lot: Vec<Lot> = s.here().filter_map(Link::lot).collect();
        if lot.is_empty() && !last {
            return;
        }
        let mut listed: Vec<Listed> = Vec::new();
        for Lot { source, chunks, .. } in &lot {
            listed.extend(chunks.iter().map(|c| Listed {
                source: *source,
                first: c.first,
                rows: c.rows,
                place: c.place,
            }));
        }
        if last {
            let rows_of = |rank| s.placing.as_ref().map_or(0, |p| p.rows_of(rank));
            let gone = s.others().filter(|rank| s.links[*rank as usize].is_none());
            let blanks = gone.map(|rank| (rank, BLANK));
            let own = s.memory.own(s.routes.first_to(s.rank));
            let rest = blanks.chain([(s.rank, own)]);
            listed.extend(rest.map(|(source, place)| Listed {
                source,
                first: 0,
                rows: rows_of(source),
                place,
            }));
        }
        self.shared.put_lot(&listed);
        self.lots += 1;
        self.lot = Some((lot, last));
        self.shared.set(Word::Rows, self.exchange * self.turns.0 + self.lots);
    }

    fn handed_out(&mut self, s: &mut State, acts: &mut Vec<Act>) -> Result<(), String> {
        let (lot, last) = self.lot.take().ok_or_else(|| gone_on(Told::HandedOut, s.phase))?;
        self.shared.put_lot(&[]);
        for lot in &lot {
            s.handed_out(lot, acts);
        }
        if last {
            s.collected(acts);
            self.shared.set(Word::Rows, (self.exchange + 1) * self.turns.0);
        }
        Ok(())
    }

    /// Whether it waits for room for answers. Who stores says so, for what may be stored to isn't
    /// quiet.
    fn awaits_room(&self) -> bool {
        self.leaving.is_none() && (!self.stores || self.combines)
    }

    /// Where answers may lie: as many as fit, whole pieces as askers expect them; own ones with the
    /// last, for they take the place of rows that have to have left.
    fn tell_room(&mut self, s: &mut State) {
        // Who stores has all answers leave at once as a rule, own ones with them: no peer is
        // entered before that.
        let may = !self.stores || s.rows_left();
        let free = may && s.answers_out == 0 && s.holds(Until::Quiet);
        let Some(placing) = s.placing.clone().filter(|_| self.awaits_room() && free) else {
            return;
        };
        let (room, mut place) = (s.shape.shared_rows(), 0);
        let (mut pieces, mut listed, mut cursor) = (Vec::new(), Vec::new(), self.cursor);
        let last = loop {
            let Some(rank) = s.others().nth(cursor.0 as usize) else { break true };
            let rows = (placing.rows_of(rank) - cursor.1).min(room);
            if rows == 0 || s.links[rank as usize].is_none() {
                cursor = (cursor.0 + 1, 0);
                continue;
            }
            let (first, all) = (cursor.1, placing.rows_of(rank) - cursor.1);
            let there = self.stores.then(|| s.answers_there(rank, first, all)).flatten();
            if let Some(AnswersThere { place, counts, stay }) = there {
                self.stays.add(Told::Answered, stay);
                pieces.push((rank, Leaving::Stored(counts)));
                listed.push(Listed { source: rank, first, rows: all, place });
                cursor = (cursor.0 + 1, 0);
                continue;
            }
            if place + rows > room {
                break false;
            }
            pieces.push((rank, Leaving::Sent(Answer { place, first, rows })));
            let lies = s.memory.shared_back(place);
            listed.push(Listed { source: rank, first, rows, place: lies });
            cursor.1 += rows;
            place += rows;
        };
        if last && !s.rows_left() {
            return;
        }
        if last {
            let place = s.memory.own_back(s.routes.first_to(s.rank));
            let rows = placing.rows_of(s.rank);
            listed.push(Listed { source: s.rank, first: 0, rows, place });
        }
        self.shared.put_answers(&listed);
        self.cursor = cursor;
        self.answers += 1;
        self.leaving = Some((pieces, last));
        self.shared.set(Word::Room, self.exchange * self.turns.1 + self.answers);
    }

    fn put_answers(&mut self, s: &mut State, acts: &mut Vec<Act>) -> Result<(), String> {
        let (pieces, last) = self.leaving.take().ok_or_else(|| gone_on(Told::Answered, s.phase))?;
        self.shared.put_answers(&[]);
        if s.phase == Phase::Collected {
            self.may_begin = false;
            s.begin_answers(acts);
        }
        for (rank, leaving) in pieces {
            match leaving {
                Leaving::Sent(answer) => s.answer(rank, answer, acts),
                Leaving::Stored(counts) => s.answers_stored(rank, counts, acts),
            }
        }
        if last {
            s.phase = Phase::Answered;
            self.shared.set(Word::Room, (self.exchange + 1) * self.turns.1);
        }
        Ok(())
    }

    fn tell_answers(&mut self, s: &State) {
        if self.answered || !s.holds(Until::Answers) {
            return;
        }
        let missing = s.missing();
        self.shared.put_missing(&missing);
        self.left_out = s.left_out(&missing);
        self.answered = true;
        self.shared.set(Word::Answers, self.exchange);
    }
}

/// The rows for all lie ready.
fn pack(s: &mut State, acts: &mut Vec<Act>) {
    for rank in s.others() {
        s.packed(rank, acts);
    }
}

fn gone_on(told: Told, phase: Phase) -> String {
    format!(
        "the device went on ({told:?}) without what it waited for, in the phase {phase:?}; raise the timeout, or \
         have every rank make the same calls"
    )
}

/// A fault is four times its position among (token, k), and a kind, as `moe/routes.cu` has it.
fn fault_text(fault: u64, topk: u32) -> String {
    let position = fault / 4;
    let (token, k) = (position / u64::from(topk), position % u64::from(topk));
    let what = match fault % 4 {
        0 => return "more tokens than there is room for; send fewer at a time".into(),
        1 => "is no expert; -1 is none",
        _ => "is an expert that it has named before; name each once",
    };
    format!("index {k} of token {token} {what}; such rows were left out of the exchange")
}
