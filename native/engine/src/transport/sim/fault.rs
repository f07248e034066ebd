//! Injected faults.

use super::{
    node::{LinkEnd, Port},
    wire::{Event, Partition, World},
};
use crate::{api::EngineId, domain::DomainError};

/// A fault. Nodes are named by the index at which they were opened, links of a NIC by their index
/// among those that are up (modulo their number); times are virtual nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// One work request fails at its sender, and after `link_down_after` the whole link. Its bytes
    /// may land. `work_index` counts modulo the work requests under way.
    WorkFails {
        node: u8,
        rail: u8,
        link_index: u8,
        work_index: u32,
        link_down_after: u64,
    },
    /// A link is lost; its ends learn of it after `local_delay` and `remote_delay`.
    LinkLost {
        node: u8,
        rail: u8,
        link_index: u8,
        local_delay: u64,
        remote_delay: u64,
    },
    /// A link carries nothing for a while, without notice.
    Stall {
        node: u8,
        rail: u8,
        link_index: u8,
        duration: u64,
    },
    /// A NIC fails: its node learns of it after `local_delay`, each peer after up to
    /// `remote_delay`.
    NicDown {
        node: u8,
        rail: u8,
        local_delay: u64,
        remote_delay: u64,
    },
    NicUp {
        node: u8,
        rail: u8,
    },
    /// A NIC carries this many bytes per microsecond from now on.
    Slow {
        node: u8,
        rail: u8,
        rate: u32,
    },
    /// Nodes whose bit is set can't communicate with the others; nodes from the 65th on have no
    /// bit. Links between them are lost at both ends after `notice_after`: for good if `permanent`,
    /// as after the peer timeout.
    Partition {
        isolated: u64,
        notice_after: Option<u64>,
        permanent: bool,
        duration: u64,
    },
    /// A process ends as by `kill -9`; peers learn of it after up to `remote_delay`.
    Crash {
        node: u8,
        remote_delay: u64,
    },
}

impl World {
    pub(crate) fn inject(&mut self, fault: &Fault, incarnations: &[EngineId]) {
        let port = |node: u8, rail| {
            incarnations.get(usize::from(node)).map(|engine| Port { engine: *engine, rail })
        };
        match *fault {
            Fault::WorkFails { node, rail, link_index, work_index, link_down_after } => {
                let Some(ends) = port(node, rail).and_then(|p| self.nth_link(p, link_index)) else {
                    return;
                };
                self.after(0, Event::WorkFails { at: ends.0, work_index });
                let remote_delay = link_down_after + self.delay();
                let cause = DomainError::LinkDown("a work request failed".into());
                self.lose(ends, (link_down_after, remote_delay), &cause);
            }
            Fault::LinkLost { node, rail, link_index, local_delay, remote_delay } => {
                let Some(ends) = port(node, rail).and_then(|p| self.nth_link(p, link_index)) else {
                    return;
                };
                self.lose(
                    ends,
                    (local_delay, remote_delay),
                    &DomainError::LinkDown("the link broke".into()),
                );
            }
            Fault::Stall { node, rail, link_index, duration } => {
                let Some((at, _)) = port(node, rail).and_then(|p| self.nth_link(p, link_index))
                else {
                    return;
                };
                let until = self.now() + duration;
                if let Some(name) = self.name_of(at) {
                    let stall = self.stalls.entry(name).or_default();
                    *stall = until.max(*stall);
                }
            }
            Fault::NicDown { node, rail, local_delay, remote_delay } => {
                if let Some(port) = port(node, rail) {
                    self.unplug(port, (local_delay, remote_delay), "its cable is out");
                }
            }
            Fault::NicUp { node, rail } => {
                if let Some(port) = port(node, rail) {
                    self.unpark(port);
                }
            }
            Fault::Slow { node, rail, rate } => {
                let node = port(node, rail).and_then(|p| self.nodes.get_mut(&p));
                if let Some(node) = node {
                    node.rate = Some(f64::from(rate.max(1)) / 1000.0);
                }
            }
            Fault::Partition { isolated, notice_after, permanent, duration } => {
                self.partition(isolated, (notice_after, permanent, duration), incarnations);
            }
            Fault::Crash { node, remote_delay } => {
                if let Some(engine) = incarnations.get(usize::from(node)) {
                    self.kill(*engine, remote_delay);
                }
            }
        }
    }

    /// Both ends of one of a NIC's links.
    fn nth_link(&self, port: Port, nth: u8) -> Option<(LinkEnd, LinkEnd)> {
        let links = &self.nodes.get(&port)?.links;
        let nth = usize::from(nth).checked_rem(links.len())?;
        let (link, end) = links.iter().nth(nth)?;
        Some(((port, *link), end.remote))
    }

    fn name_of(&self, (port, link): LinkEnd) -> Option<u64> {
        Some(self.nodes.get(&port)?.links.get(&link)?.name)
    }

    fn lose(&mut self, ends: (LinkEnd, LinkEnd), after: (u64, u64), cause: &DomainError) {
        self.after(after.0, Event::Cut { at: ends.0, cause: cause.clone() });
        self.after(after.1, Event::Cut { at: ends.1, cause: cause.clone() });
    }

    /// Both ends of every link of a NIC.
    pub(super) fn links_of(&self, port: Port) -> Vec<(LinkEnd, LinkEnd)> {
        let Some(node) = self.nodes.get(&port) else { return Vec::new() };
        node.links.iter().map(|(link, end)| ((port, *link), end.remote)).collect()
    }

    /// Unplugs a NIC: nothing arrives or leaves until it is plugged in.
    pub(crate) fn unplug(
        &mut self,
        port: Port,
        (local_delay, remote_delay): (u64, u64),
        cause: &str,
    ) {
        let links = self.links_of(port);
        let Some(node) = self.nodes.get_mut(&port) else { return };
        node.unplugged = true;
        let cause = DomainError::LinkDown(cause.into());
        for (own_end, remote_end) in links {
            let remote_delay = self.rng.u64(..=remote_delay);
            match local_delay {
                0 => self.cut(own_end, &cause),
                _ => self.after(local_delay, Event::Cut { at: own_end, cause: cause.clone() }),
            }
            self.after(remote_delay, Event::Cut { at: remote_end, cause: cause.clone() });
        }
    }

    fn partition(
        &mut self,
        isolated: u64,
        how: (Option<u64>, bool, u64),
        incarnations: &[EngineId],
    ) {
        let (notice_after, permanent, duration) = how;
        let mut one_side = Vec::new();
        for (i, engine) in incarnations.iter().enumerate() {
            if isolated.checked_shr(i as u32).is_some_and(|bits| bits & 1 == 1) {
                one_side.push(*engine);
            }
        }
        let until = self.now() + duration;
        let apart = |a: Port, b: Port| one_side.contains(&a.engine) != one_side.contains(&b.engine);
        let ports = self.nodes.ports();
        let links = ports.into_iter().flat_map(|p| self.links_of(p));
        let lost: Vec<LinkEnd> = links.filter(|(a, b)| apart(a.0, b.0)).map(|(a, _)| a).collect();
        self.partitions.retain(|p| p.until > until - duration);
        self.partitions.push(Partition { one_side, until });
        let Some(notice_after) = notice_after else { return };
        for at in lost {
            let why = "nothing received for too long".to_owned();
            let cause = if permanent { DomainError::Gone(why) } else { DomainError::LinkDown(why) };
            let after = notice_after + self.delay();
            self.after(after, Event::Cut { at, cause });
        }
    }

    /// Ends all NICs of an engine at once; peers learn of it one by one.
    pub(crate) fn kill(&mut self, engine: EngineId, remote_delay: u64) {
        let cause = DomainError::LinkDown("the peer's process has ended".into());
        let ports = self.nodes.ports();
        for port in ports.into_iter().filter(|p| p.engine == engine) {
            self.end(port, remote_delay, &cause);
        }
        self.close_peer_mappings_of(engine);
    }

    /// Ends a NIC.
    pub(crate) fn end(&mut self, port: Port, remote_delay: u64, cause: &DomainError) {
        for (_, remote_end) in self.links_of(port) {
            let after = self.rng.u64(..=remote_delay);
            self.after(after, Event::Cut { at: remote_end, cause: cause.clone() });
        }
        self.nodes.remove(&port);
    }

    /// Plugs all NICs in.
    pub(crate) fn plug_all(&mut self) {
        let ports = self.nodes.ports();
        ports.into_iter().for_each(|p| self.unpark(p));
    }

    /// Ends a link at one end.
    pub(crate) fn cut(&mut self, (port, link): LinkEnd, cause: &DomainError) {
        let receipts = self.config.receipts();
        if let Some(node) = self.nodes.get_mut(&port) {
            self.stirred.insert(port.engine);
            node.cut(link, cause, receipts);
        }
    }

    pub(crate) fn work_fails(&mut self, (port, link): LinkEnd, work_index: u32) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        let Some(end) = node.links.get_mut(&link) else { return };
        let Some(nth) = (work_index as usize).checked_rem(end.posted.len()) else { return };
        let (token, number) = end.posted[nth];
        end.failed.push((token, number));
        node.complete(link, token, Err(DomainError::LinkDown("it was not acknowledged".into())));
    }
}
