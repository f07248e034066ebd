//! Handshakes by datagram (UD). Datagrams may be lost; the sender repeats them until it has an
//! answer.

use std::sync::Arc;

use fabric_sys::ibverbs as sys;

use super::{
    address::mtu_bytes,
    chain,
    device::Device,
    memory::Slots,
    raw::{Ah, Cq, Qp},
};
use crate::{domain::DomainError, transport::log_limit::LogLimit};

const DEPTH: u32 = 64;
/// Every received datagram begins with room for the global routing header.
const GRH: usize = 40;

/// A destination of datagrams.
#[derive(Clone, Debug)]
pub(super) struct DatagramAddress {
    pub ah: Arc<Ah>,
    pub qpn: u32,
    pub qkey: u32,
    /// Largest datagram that both ends take, bytes.
    pub mtu: usize,
}

pub(super) struct Datagrams {
    // Dropped first, so that the NIC is done with the slots.
    qp: Qp,
    cq: Arc<Cq>,
    slots: Slots,
    mtu: usize,
    pub qkey: u32,
    free: Vec<u32>,
    /// Address handles of datagrams under way.
    held: Vec<Option<Arc<Ah>>>,
    log: LogLimit,
}

impl Datagrams {
    pub fn open(device: &Device) -> Result<Self, DomainError> {
        let mut random = [0; 4];
        getrandom::fill(&mut random)
            .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
        // The highest bit selects the queue pair's own qkey.
        let qkey = u32::from_le_bytes(random) & 0x7FFF_FFFF;
        let cq = Cq::new(&device.channel, 2 * DEPTH)?;
        let qp = device.datagram_pair(&cq, DEPTH, qkey)?;
        let mtu = mtu_bytes(device.mtu);
        let slots = Slots::new(&device.pd, 2 * DEPTH as usize, GRH + mtu)?;
        for i in 0..DEPTH {
            chain::receive(&qp, u64::from(i), slots.whole(i as usize))?;
        }
        let free = (DEPTH..2 * DEPTH).collect();
        let held = vec![None; 2 * DEPTH as usize];
        Ok(Self { qp, cq, slots, mtu, qkey, free, held, log: LogLimit::default() })
    }

    pub fn number(&self) -> u32 {
        self.qp.number()
    }

    /// Sends a frame; drops it if no slot is free.
    pub fn send(&mut self, to: &DatagramAddress, frame: &[u8]) {
        let Some(i) = self.free.pop() else { return };
        let n = frame.len().min(self.mtu);
        self.slots.fill(i as usize)[..n].copy_from_slice(&frame[..n]);
        let sge = self.slots.sge(i as usize, n);
        match chain::datagram(&self.qp, u64::from(i), sge, &to.ah, (to.qpn, to.qkey)) {
            Ok(()) => self.held[i as usize] = Some(Arc::clone(&to.ah)),
            Err(error) => {
                self.log.warn("a datagram could not be sent", &error);
                self.free.push(i);
            }
        }
    }

    /// Passes each received frame to `on_frame`.
    pub fn poll(&mut self, mut on_frame: impl FnMut(&[u8])) -> bool {
        let mut wcs = [sys::Wc::default(); 16];
        let n = self.cq.poll(&mut wcs);
        for wc in &wcs[..n] {
            let i = wc.wr_id as u32;
            if i >= DEPTH {
                self.held[i as usize] = None;
                self.free.push(i);
                if wc.status != sys::WC_SUCCESS {
                    // A failed send may have stopped the send queue; receives go on. Its sender
                    // repeats the datagram.
                    let attr = sys::QpAttr { qp_state: sys::QPS_RTS, ..Default::default() };
                    let _ = self.qp.modify(attr, sys::qp_mask::STATE);
                }
                continue;
            }
            if wc.status == sys::WC_SUCCESS && wc.byte_len as usize > GRH {
                let n = (wc.byte_len as usize).min(GRH + self.mtu);
                on_frame(&self.slots.read(i as usize, n)[GRH..]);
            }
            if wc.status == sys::WC_WR_FLUSH_ERR {
                // The queue pair has failed; handshakes go by TCP.
                continue;
            }
            let _ = chain::receive(&self.qp, u64::from(i), self.slots.whole(i as usize));
        }
        n > 0
    }

    pub fn notify(&self) {
        self.cq.notify();
    }
}
