//! An exchange that kernels execute: what they may read, and the effects of their commands.
//!
//! The device takes the caller's part of the exchange. It reports by commands, in order, and waits
//! for words in between; no host call is needed between two kernels. State and wire format are
//! those of a caller's exchange, so ranks with and without kernels take part in one exchange. A
//! lost rank is masked: the device's wait then ends without it.

mod reports;

use std::sync::Arc;

use fabric_engine::{EngineError, Result};

use super::{
    actions::Action,
    conditions::Condition,
    direct_stores::{ActiveStores, AnswerStores},
    link::{Answer, PeerLink, RowBatch},
    state::ExchangeState,
};
use crate::{
    device::{rounds, DeviceEvent, DeviceReport, ListedRows, SharedWords, Word, ZERO_ROWS},
    phase::Phase,
    routes::{Order, Routes, RowPlacement},
    shape::Shape,
};

/// The device's part of an exchange.
#[derive(Debug)]
pub struct Device {
    shared: SharedWords,
    /// Rounds of rows and of answers in each exchange.
    rounds: (u64, u64),
    /// The number of its exchange, from 1.
    exchange: u64,
    /// The ticket of its dispatch.
    ticket: u32,
    /// The device may write its rows.
    may_begin: bool,
    /// The device's next routes, while the last exchange has not ended.
    begins: Option<Routes>,
    packed: bool,
    /// Whether the device has the routes of this exchange. `answered`: the answers.
    routed: bool,
    answered: bool,
    /// The round of rows, the rows that are being handed out, and whether these are the last.
    row_round: u64,
    batch: Option<(Vec<RowBatch>, bool)>,
    /// Number of answered ranks, in the order of `ExchangeState::others`, and of answered rows of
    /// the next one.
    cursor: (u32, u64),
    /// The round of answers, the answers that are being written, and whether these are the last.
    answer_round: u64,
    leaving: Option<(Vec<(u32, AnswerTransfer)>, bool)>,
    /// Whether the device stores to the peer memory that it reaches.
    stores: bool,
    /// Whether the device has reported that it waits for room for answers.
    combines: bool,
    /// Peers' memory that it may be storing to.
    active_stores: ActiveStores,
    /// Ranks whose answers are missing in the last sums.
    left_out: Vec<u32>,
    /// The fault that the device found in tokens, until it is reported.
    fault: Option<String>,
    failed: Option<EngineError>,
}

/// Answers to a rank's rows.
#[derive(Clone, Copy, Debug)]
enum AnswerTransfer {
    /// The engine writes them from the shared buffer.
    Sent(Answer),
    /// The device has stored them; this many counts follow.
    Stored(u32),
}

impl Device {
    pub fn new(shared: SharedWords, shape: &Shape, stores: bool) -> Self {
        Self {
            shared,
            rounds: rounds(shape),
            exchange: 0,
            ticket: 0,
            may_begin: true,
            begins: None,
            packed: false,
            routed: false,
            answered: false,
            row_round: 0,
            batch: None,
            cursor: (0, 0),
            answer_round: 0,
            leaving: None,
            stores,
            combines: false,
            active_stores: ActiveStores::default(),
            left_out: Vec::new(),
            fault: None,
            failed: None,
        }
    }

    /// Ranks whose answers are missing in the last sums.
    pub fn left_out(&self) -> Vec<u32> {
        self.left_out.clone()
    }

    /// See [`AllToAll::check`](super::AllToAll::check).
    pub fn check(&mut self) -> Result<()> {
        self.check_failed()?;
        self.fault.take().map_or(Ok(()), |fault| Err(EngineError::Invalid(fault)))
    }

    /// # Errors
    /// The error that ended the exchange on the device.
    pub fn check_failed(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Whether it stores to peers' memory itself where it reaches it.
    pub fn stores(&self) -> bool {
        self.stores
    }

    /// Ends all stores and returns them, see [`ActiveStores::take_ended`].
    #[must_use]
    pub fn settled(&mut self) -> ActiveStores {
        std::mem::take(&mut self.active_stores)
    }

    /// Whether it may be storing to peers' memory now.
    pub fn is_storing(&self) -> bool {
        !self.active_stores.is_empty()
    }

    /// Whether its tokens wait for the end of the last exchange.
    pub fn begins(&self) -> bool {
        self.begins.is_some() && self.failed.is_none()
    }

    /// Whether it reads rows now, which must stay where they are.
    pub fn hands_out(&self) -> bool {
        self.batch.is_some() && self.failed.is_none()
    }

    /// Whether it reads rows of this rank now, whose process may have been lost since.
    pub fn hands_out_rows_of(&self, rank: u32) -> bool {
        let batch = self.batch.as_ref().filter(|_| self.failed.is_none());
        batch.is_some_and(|(batch, _)| batch.iter().any(|rows| rows.source == rank))
    }

    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Whether it has the routes of the dispatch with this ticket.
    pub fn has_routes_of(&self, ticket: u32) -> bool {
        self.ticket == ticket && self.begins.is_none() && self.routed
    }

    fn hangs(&self, s: &ExchangeState) -> bool {
        let condition = match s.phase {
            _ if self.failed.is_some() => return false,
            _ if self.begins.is_some() => Condition::MayDispatch,
            Phase::Dispatched if self.routed && self.batch.is_none() => Condition::Rows,
            Phase::Collected | Phase::Answering if self.awaits_room() => Condition::AnswersSent,
            Phase::Idle if !self.may_begin => Condition::MayDispatch,
            _ => return false,
        };
        s.blocked_on_quiesce(condition)
    }

    /// Ends the exchange for the device, and every wait of it (RS-4).
    pub fn end(&mut self, cause: EngineError) {
        self.failed.get_or_insert(cause);
        self.shared.abort();
    }

    fn fail(&mut self, error: EngineError) {
        tracing::warn!(%error, "an exchange on a device has failed");
        self.end(error);
    }

    fn advance(&mut self, s: &mut ExchangeState, actions: &mut Vec<Action>) {
        if self.failed.is_some() {
            return;
        }
        if self.begins.is_some() {
            if !s.holds(Condition::MayDispatch) {
                return;
            }
            self.begin(s, actions);
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

    fn on_event(
        &mut self,
        s: &mut ExchangeState,
        DeviceReport { event, ticket, .. }: DeviceReport,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        match (event, s.phase) {
            (DeviceEvent::Begun, Phase::Idle | Phase::Collected) if self.may_begin => {
                let (routes, fault) =
                    self.shared.read_routes(&s.shape).map_err(|e| e.to_string())?;
                if let Some(fault) = fault {
                    self.fault = Some(fault_text(fault, s.shape.topk));
                }
                self.begins = Some(routes);
                self.ticket = ticket;
                (self.packed, self.may_begin) = (false, false);
                self.exchange += 1;
            }
            (DeviceEvent::Packed, _) if self.begins.is_some() => self.packed = true,
            (DeviceEvent::Packed, Phase::Dispatched) => {
                self.packed = true;
                pack(s, actions);
            }
            (DeviceEvent::Combining, Phase::Collected) => self.combines = true,
            (DeviceEvent::HandedOut, Phase::Dispatched) => self.handed_out(s, actions)?,
            (DeviceEvent::Answered, Phase::Collected | Phase::Answering) => {
                self.put_answers(s, actions)?
            }
            // The exchange needed fewer rounds than the maximum.
            (DeviceEvent::HandedOut, Phase::Collected)
            | (DeviceEvent::Answered, Phase::Answered) => {}
            (DeviceEvent::Summed, Phase::Answered) if self.answered => s.phase = Phase::Idle,
            (event, phase) => return Err(unexpected(event, phase)),
        }
        Ok(())
    }

    fn begin(&mut self, s: &mut ExchangeState, actions: &mut Vec<Action>) {
        self.shared.clear();
        (self.routed, self.answered, self.row_round, self.answer_round) = (false, false, 0, 0);
        (self.batch, self.leaving, self.cursor) = (None, None, (0, 0));
        self.combines = false;
        s.begin(Arc::new(self.begins.take().unwrap_or_default()), actions);
        if self.packed {
            pack(s, actions);
        }
        if self.stores {
            let paths = s.row_paths(&mut self.active_stores);
            self.shared.put_row_paths(&paths);
            self.shared.set(Word::RowPaths, self.exchange);
        }
    }

    fn tell_over(&mut self, s: &ExchangeState, value: u64) {
        if s.holds(Condition::MayDispatch) {
            self.may_begin = true;
            self.shared.set(Word::Over, value);
        }
    }

    fn tell_routes(&mut self, s: &mut ExchangeState) {
        if self.routed || !s.holds(Condition::Routes) {
            return;
        }
        let incoming = s.incoming();
        self.shared.put_incoming(&incoming, s.shape.local_experts() as usize);
        match RowPlacement::new(s.shape.local_experts(), incoming, Order::Packed { multiple: 1 }) {
            Ok(placing) => {
                s.placing = Some(Arc::new(placing));
                self.routed = true;
                self.shared.set(Word::Routes, self.exchange);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Offers rows when all that were offered room have arrived, so that a round is the last or
    /// fills the buffer.
    fn tell_rows(&mut self, s: &ExchangeState) {
        let due = s.here().any(|l| l.inbound.due > 0);
        let full = s.next_place == s.shape.shared_rows();
        let last = s.waiting.is_empty();
        if !self.routed || self.batch.is_some() || due || !(last || full) {
            return;
        }
        let batch: Vec<RowBatch> = s.here().filter_map(PeerLink::batch).collect();
        if batch.is_empty() && !last {
            return;
        }
        let mut listed: Vec<ListedRows> = Vec::new();
        for RowBatch { source, chunks, .. } in &batch {
            listed.extend(chunks.iter().map(|c| ListedRows {
                source: *source,
                first: c.first,
                rows: c.rows,
                place: c.place,
            }));
        }
        if last {
            let rows_of = |rank| s.placing.as_ref().map_or(0, |p| p.rows_of(rank));
            let gone = s.others().filter(|rank| s.links[*rank as usize].is_none());
            let blanks = gone.map(|rank| (rank, ZERO_ROWS));
            let own = s.memory.own(s.routes.first_to(s.rank));
            let rest = blanks.chain([(s.rank, own)]);
            listed.extend(rest.map(|(source, place)| ListedRows {
                source,
                first: 0,
                rows: rows_of(source),
                place,
            }));
        }
        self.shared.put_rows(&listed);
        self.row_round += 1;
        self.batch = Some((batch, last));
        self.shared.set(Word::Rows, self.exchange * self.rounds.0 + self.row_round);
    }

    fn handed_out(
        &mut self,
        s: &mut ExchangeState,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let (batch, last) =
            self.batch.take().ok_or_else(|| unexpected(DeviceEvent::HandedOut, s.phase))?;
        self.shared.put_rows(&[]);
        for batch in &batch {
            s.handed_out(batch, actions);
        }
        if last {
            s.collected(actions);
            self.shared.set(Word::Rows, (self.exchange + 1) * self.rounds.0);
        }
        Ok(())
    }

    /// Whether it waits for room for answers. A device that stores reports so first: memory that
    /// may be stored to isn't quiesced.
    fn awaits_room(&self) -> bool {
        self.leaving.is_none() && (!self.stores || self.combines)
    }

    /// Tells the device where to write answers: as many as fit, in the chunks that peers expect.
    /// Own answers come with the last ones, because they replace own rows, which must have left.
    fn tell_room(&mut self, s: &mut ExchangeState) {
        // A device that stores usually writes all answers in one round, own ones included, so it
        // starts no store before own rows have left.
        let may = !self.stores || s.rows_left();
        let free = may && s.answers_out == 0 && s.holds(Condition::Quiesced);
        let Some(placing) = s.placing.clone().filter(|_| self.awaits_room() && free) else {
            return;
        };
        let (room, mut place) = (s.shape.shared_rows(), 0);
        let (mut transfers, mut listed, mut cursor) = (Vec::new(), Vec::new(), self.cursor);
        let last = loop {
            let Some(rank) = s.others().nth(cursor.0 as usize) else { break true };
            let rows = (placing.rows_of(rank) - cursor.1).min(room);
            if rows == 0 || s.links[rank as usize].is_none() {
                cursor = (cursor.0 + 1, 0);
                continue;
            }
            let (first, all) = (cursor.1, placing.rows_of(rank) - cursor.1);
            let there = self.stores.then(|| s.answer_stores(rank, first, all)).flatten();
            if let Some(AnswerStores { place, counts, guard }) = there {
                self.active_stores.add(DeviceEvent::Answered, guard);
                transfers.push((rank, AnswerTransfer::Stored(counts)));
                listed.push(ListedRows { source: rank, first, rows: all, place });
                cursor = (cursor.0 + 1, 0);
                continue;
            }
            if place + rows > room {
                break false;
            }
            transfers.push((rank, AnswerTransfer::Sent(Answer { place, first, rows })));
            let lies = s.memory.shared_back(place);
            listed.push(ListedRows { source: rank, first, rows, place: lies });
            cursor.1 += rows;
            place += rows;
        };
        if last && !s.rows_left() {
            return;
        }
        if last {
            let place = s.memory.own_back(s.routes.first_to(s.rank));
            let rows = placing.rows_of(s.rank);
            listed.push(ListedRows { source: s.rank, first: 0, rows, place });
        }
        self.shared.put_answers(&listed);
        self.cursor = cursor;
        self.answer_round += 1;
        self.leaving = Some((transfers, last));
        self.shared.set(Word::Room, self.exchange * self.rounds.1 + self.answer_round);
    }

    fn put_answers(
        &mut self,
        s: &mut ExchangeState,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let (transfers, last) =
            self.leaving.take().ok_or_else(|| unexpected(DeviceEvent::Answered, s.phase))?;
        self.shared.put_answers(&[]);
        if s.phase == Phase::Collected {
            self.may_begin = false;
            s.begin_answers(actions);
        }
        for (rank, leaving) in transfers {
            match leaving {
                AnswerTransfer::Sent(answer) => s.answer(rank, answer, actions),
                AnswerTransfer::Stored(counts) => s.answers_stored(rank, counts, actions),
            }
        }
        if last {
            s.phase = Phase::Answered;
            self.shared.set(Word::Room, (self.exchange + 1) * self.rounds.1);
        }
        Ok(())
    }

    fn tell_answers(&mut self, s: &ExchangeState) {
        if self.answered || !s.holds(Condition::Answers) {
            return;
        }
        let missing = s.missing();
        self.shared.put_missing(&missing);
        self.left_out = s.left_out(&missing);
        self.answered = true;
        self.shared.set(Word::Answers, self.exchange);
    }
}

/// Records that the rows for all ranks are packed.
fn pack(s: &mut ExchangeState, actions: &mut Vec<Action>) {
    for rank in s.others() {
        s.packed(rank, actions);
    }
}

fn unexpected(event: DeviceEvent, phase: Phase) -> String {
    format!(
        "the device reported {event:?} in the phase {phase:?}, before its wait was over; raise the timeout, or \
         have every rank make the same calls"
    )
}

/// A fault is four times its position among (token, k), plus a kind, as `moe/routes.cuh` encodes it.
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
