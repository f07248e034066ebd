//! Received messages, until the pool has room for them.

use super::{
    frame::{Header, Kind, HEADER},
    TcpDomain,
};
use crate::domain::{Admit, Completion, MessageRoom};

impl TcpDomain {
    /// Delivers the oldest message of the link that was served least recently, if the pool has
    /// room. One per poll: each takes its buffer before the next is admitted.
    pub(super) fn deliver_waiting(&mut self, room: &dyn MessageRoom, out: &[Completion]) -> bool {
        let is_message = |c: &Completion| matches!(c, Completion::Message { .. });
        if out.iter().chain(&self.completions).any(is_message) {
            return false;
        }
        let waiting = self.links.iter().filter(|(_, l)| !l.waiting_messages.is_empty());
        let mut waiting: Vec<_> = waiting.map(|(_, l)| (l.delivered_at, l.id)).collect();
        waiting.sort_unstable();
        let (now, mut progressed) = (self.now, false);
        for (_, id) in waiting {
            let Some(link) = self.link(id) else { continue };
            let Some((op, message)) = link.waiting_messages.pop_front() else { continue };
            let (code, limit) = match room.admit(message.len()) {
                Admit::Take => {
                    link.delivered_at = now;
                    let message = message.into_boxed_slice();
                    // After a pending `LinkUp`: before it the group does not know the link.
                    self.completions.push(Completion::Message { link: id, message });
                    (0, 0)
                }
                Admit::TooLong { limit } => (1, limit as u64),
                Admit::Wait => {
                    link.waiting_messages.push_front((op, message));
                    continue;
                }
            };
            progressed = true;
            if let Some(key) = self.link(id).and_then(|l| l.urgent_stream()) {
                let taken = Header { code, op, len: limit, ..Header::new(Kind::MessageResult) };
                let stream = &mut self.sockets[key].stream;
                stream.queue_bytes(&taken.encode());
                stream.charge_reply(HEADER as u64);
            }
            if code == 0 {
                break;
            }
        }
        progressed
    }
}
