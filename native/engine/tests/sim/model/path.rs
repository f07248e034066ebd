//! One run in which the explorer chooses every step.

use fabric_engine::{
    simulation::SimNet,
    transport::sim::{Fault, NextEvent, SimConfig},
};

use super::scopes::{Budget, Scope};
use crate::{
    check::{broken, Checked},
    run::Run,
};

/// A possible next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// The user takes the next step.
    User,
    Network(NextEvent),
    /// Time passes until the next timer, although events are pending.
    Hurry,
    /// A node crashes.
    Crash(u8),
}

pub struct Path<'a> {
    scope: &'a Scope,
    run: Run<'a>,
    left: Budget,
    /// Steps that the user has taken.
    steps: usize,
}

impl<'a> Path<'a> {
    pub fn new(scope: &'a Scope) -> Self {
        let shape = &scope.case.shape;
        let net = SimNet::new(SimConfig { free: true, ..shape.config(scope.case.seed) });
        let mut run = Run::on(&scope.case, net);
        let Budget { losses, crashes, hurries } = scope.budget;
        let has_receipts = shape.ordered || !shape.page_counts;
        run.must_succeed = has_receipts && crashes + hurries == 0;
        run.messages_may_fail = losses > 0;
        run.connect_from(0);
        while let Some(first @ NextEvent::Event(_)) = run.net.choices().first().copied() {
            run.net.take(first);
        }
        let mut path = Self { scope, run, left: scope.budget, steps: 0 };
        while !scope.anywhere && path.steps < scope.case.work.len() {
            path.user().expect("nothing has gone wrong yet");
        }
        path
    }

    /// The possible next steps; empty at the end of the run.
    pub fn moves(&mut self) -> Result<Vec<Move>, crate::check::Violation> {
        loop {
            let mut moves = Vec::new();
            if self.steps < self.scope.case.work.len() {
                moves.push(Move::User);
            }
            let choices = self.run.net.choices();
            let (events, losses): (Vec<_>, Vec<_>) =
                choices.into_iter().partition(|c| matches!(c, NextEvent::Event(_)));
            moves.extend(events.into_iter().map(Move::Network));
            let is_over = moves.is_empty() && !self.run.is_busy();
            if self.left.losses > 0 && !is_over {
                moves.extend(losses.into_iter().map(Move::Network));
            }
            if self.left.hurries > 0 && self.run.is_busy() {
                moves.push(Move::Hurry);
            }
            if self.left.crashes > 0 && !is_over {
                moves.extend((0..2).map(Move::Crash));
            }
            if !moves.is_empty() || is_over {
                return Ok(moves);
            }
            // No event is pending: the rest waits for timers.
            self.pass_time()?;
        }
    }

    pub fn take(&mut self, what: Move) -> Checked {
        match what {
            Move::User => return self.user(),
            Move::Network(choice) => {
                self.left.losses -= u8::from(matches!(choice, NextEvent::Loss(_)));
                self.run.net.take(choice);
            }
            Move::Hurry => {
                self.left.hurries -= 1;
                return self.pass_time();
            }
            Move::Crash(node) => {
                self.left.crashes -= 1;
                self.run.net.inject(&Fault::Crash { node, remote_delay: 0 });
                self.run.net.user_acts(1 - usize::from(node), u64::from(node) << 8);
                self.run.end(node);
            }
        }
        self.run.check()
    }

    pub fn end(&mut self) -> Checked {
        self.run.check_end()
    }

    /// A digest of the state: paths with equal digests have equal continuations.
    pub fn state(&self) -> u64 {
        let Budget { losses, crashes, hurries } = self.left;
        let left = u64::from_le_bytes([losses, crashes, hurries, self.steps as u8, 0, 0, 0, 0]);
        self.run.net.state() ^ left.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    pub fn describe(&self, what: Move) -> String {
        match what {
            Move::Network(choice) => self.run.net.describe(choice),
            Move::User => format!("{:?}", self.scope.case.work[self.steps].1),
            Move::Hurry => "a timer strikes".into(),
            Move::Crash(node) => format!("node {node} ends"),
        }
    }

    fn user(&mut self) -> Checked {
        let (_, step) = &self.scope.case.work[self.steps];
        self.steps += 1;
        (0..2).for_each(|node| self.run.net.user_acts(node, self.steps as u64));
        self.run.step(step)?;
        self.run.net.choices();
        self.run.check()
    }

    fn pass_time(&mut self) -> Checked {
        if !self.run.net.pass_time() {
            let now = self.run.net.now().0;
            return broken("IC-4", now, format!("never ends: {:?}", self.run.still()));
        }
        self.run.check()
    }
}
