//! Reports of the device, and waits of it that time out.

use std::time::Duration;

use fabric_engine::{EngineError, Result};

use super::{ActiveStores, Condition, DeviceReport};
use crate::exchange::{actions::Action, state::ExchangeState};

impl ExchangeState {
    /// Sets the words whose conditions hold now.
    pub fn advance(&mut self, actions: &mut Vec<Action>) {
        if let Some(mut device) = self.device.take() {
            device.advance(self, actions);
            self.device = Some(device);
        }
    }

    /// Applies a report of the device. Returns the stores that it ends, see
    /// [`ActiveStores::take_ended`].
    pub fn on_device_report(
        &mut self,
        report: Result<DeviceReport, String>,
        actions: &mut Vec<Action>,
    ) -> ActiveStores {
        let Some(mut device) = self.device.take() else { return ActiveStores::default() };
        let over = report
            .as_ref()
            .map(|report| device.active_stores.take_ended(report.event))
            .unwrap_or_default();
        if device.failed.is_none() {
            match report
                .and_then(DeviceReport::checked)
                .and_then(|report| device.on_event(self, report, actions))
            {
                Ok(()) => device.advance(self, actions),
                Err(cause) => device.fail(self.gives_up(cause)),
            }
        }
        self.device = Some(device);
        if self.blocked_by_lost_ranks() {
            self.start_heartbeat(actions);
        }
        over
    }

    /// Whether the device waits for memory that lost ranks may access.
    pub fn device_blocked(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.hangs(self))
    }

    /// Ends the exchange of a device: memory of lost ranks was not quiesced for `after`, or never
    /// will be.
    pub fn device_is_stuck(&mut self, after: Duration, cause: &str) {
        let error = self.not_quiesced(after, cause);
        if let Some(device) = self.device.as_mut().filter(|d| d.failed.is_none()) {
            device.fail(error);
        }
    }

    /// The error of a device whose wait has timed out.
    fn gives_up(&self, cause: String) -> EngineError {
        match self.holds(Condition::Quiesced) {
            true => EngineError::Cancelled { what: "exchange on the device", cause },
            false => self.not_quiesced(Duration::ZERO, &cause),
        }
    }

    fn not_quiesced(&self, after: Duration, cause: &str) -> EngineError {
        EngineError::NotQuiesced {
            what: "memory that is shared with a lost rank".into(),
            after,
            cause: format!(
                "ranks {:?} may still access it, and {} failed writes may still read it; {cause}",
                self.revoking, self.failed_in_flight
            ),
        }
    }
}
