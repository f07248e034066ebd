//! What the library offers: its `fi_info` entries, owned, and the part of them that is used here.

use std::{
    ffi::{c_char, CStr},
    net::{Ipv4Addr, Ipv6Addr},
    ptr::{null, null_mut},
};

use fabric_sys::libfabric::{self as fi, flag, mode, mr_mode};

use super::library::Api;
use crate::domain::DomainError;

/// What one entry says, as plain values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offer {
    pub provider: String,
    pub fabric: String,
    /// The NIC.
    pub domain: String,
    pub addr_format: u32,
    pub source: Vec<u8>,
    pub protocol: u32,
    pub mode: u64,
    pub mr_mode: i32,
    pub key_bytes: usize,
    pub cq_data_bytes: usize,
    pub tx_size: usize,
    pub rx_size: usize,
    pub max_bytes: u64,
    /// Whether it registers memory of GPUs.
    pub hmem: bool,
    pub auto_progress: bool,
    /// Bits per second; 0: not known.
    pub speed: u64,
    pub pci: Option<String>,
    pub down: bool,
}

impl Offer {
    /// Whether bytes are placed by the NIC itself, so that ending a registration ends all access.
    pub fn is_rdma(&self) -> bool {
        let first = self.provider.split(';').next().unwrap_or_default();
        matches!(first, "efa" | "verbs" | "cxi")
    }

    pub fn is_efa(&self) -> bool {
        self.provider.split(';').next() == Some("efa")
    }

    /// Whether a refused access can't be asked about: the shm provider of some versions leaves the
    /// operation hanging, and a connection of verbs breaks, with all that is under way on it. There,
    /// peers are asked before an access, not after it.
    pub fn hides_refusals(&self) -> bool {
        self.provider.split(';').any(|p| matches!(p, "shm" | "verbs"))
    }

    /// Whether closing needs the peers' silence: `ofi_rxm` reads what a connection still had for it
    /// after it has closed that connection, and gives the buffers back to what is gone (until 2.6),
    /// which can crash the process.
    pub fn closes_late(&self) -> bool {
        self.provider.split(';').any(|p| p == "ofi_rxm")
    }

    /// Whether only this host can be reached from there.
    pub fn is_local(&self) -> bool {
        match self.ip() {
            Some(std::net::IpAddr::V4(ip)) => ip.is_loopback(),
            Some(std::net::IpAddr::V6(ip)) => ip.is_loopback(),
            None => self.provider.split(';').next() == Some("shm"),
        }
    }

    /// Whether its address means something else on every link.
    pub fn is_link_local(&self) -> bool {
        matches!(self.ip(), Some(std::net::IpAddr::V6(ip)) if ip.is_unicast_link_local())
    }

    /// The address of the NIC, where it is one of IP.
    pub fn ip(&self) -> Option<std::net::IpAddr> {
        ip_of(self.addr_format, &self.source)
    }
}

/// The IP address in a socket address of C.
pub(super) fn ip_of(format: u32, bytes: &[u8]) -> Option<std::net::IpAddr> {
    match format {
        fi::SOCKADDR_IN => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(Ipv4Addr::from(ip).into())
        }
        fi::SOCKADDR_IN6 => {
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            Some(Ipv6Addr::from(ip).into())
        }
        _ => None,
    }
}

/// One entry, allocated by the library.
pub(super) struct OwnedInfo {
    api: Api,
    raw: *mut fi::Info,
    pub offer: Offer,
}

// SAFETY: plain memory of the library's, reached through this owner only.
unsafe impl Send for OwnedInfo {}

impl Drop for OwnedInfo {
    fn drop(&mut self) {
        // SAFETY: it came from fi_dupinfo and is freed once.
        unsafe { (self.api.fns.freeinfo)(self.raw) };
    }
}

impl OwnedInfo {
    pub fn raw(&self) -> *mut fi::Info {
        self.raw
    }
}

unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: the caller's pointer is a string of the library's.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// Reads what is used of an entry.
///
/// # Safety
/// `raw` is an entry from fi_getinfo or fi_dupinfo.
unsafe fn read(raw: *const fi::Info) -> Offer {
    // SAFETY: such entries have all their attributes; only `nic` may be missing, and parts of it.
    unsafe {
        let info = &*raw;
        let (ep, domain, fabric) = (&*info.ep_attr, &*info.domain_attr, &*info.fabric_attr);
        let source = match info.src_addr.is_null() {
            true => Vec::new(),
            false => {
                std::slice::from_raw_parts(info.src_addr.cast::<u8>(), info.src_addrlen).to_vec()
            }
        };
        let nic = info.nic.as_ref();
        let link = nic.and_then(|n| n.link_attr.as_ref());
        let bus = nic.and_then(|n| n.bus_attr.as_ref()).filter(|b| b.kind == fi::BUS_PCI);
        Offer {
            provider: text(fabric.prov_name),
            fabric: text(fabric.name),
            domain: text(domain.name),
            addr_format: info.addr_format,
            source,
            protocol: ep.protocol,
            mode: info.mode,
            mr_mode: domain.mr_mode,
            key_bytes: domain.mr_key_size,
            cq_data_bytes: domain.cq_data_size,
            tx_size: (*info.tx_attr).size,
            rx_size: (*info.rx_attr).size,
            max_bytes: ep.max_msg_size as u64,
            hmem: takes_gpus(info.caps, domain.mr_mode),
            auto_progress: domain.data_progress == fi::PROGRESS_AUTO,
            speed: link.map_or(0, |l| l.speed as u64),
            pci: bus.map(|b| {
                format!("{:04x}:{:02x}:{:02x}.{:x}", b.domain, b.bus, b.device, b.function)
            }),
            down: link.is_some_and(|l| l.state == fi::LINK_DOWN),
        }
    }
}

/// The capabilities and the ways of registration to ask for.
fn wanted(provider: Option<&str>, hmem: bool) -> (u64, i32) {
    let access = flag::READ | flag::WRITE | flag::REMOTE_READ | flag::REMOTE_WRITE;
    let mut caps = flag::MSG | flag::RMA | flag::SEND | flag::RECV | access;
    let mut ways = mr_mode::LOCAL
        | mr_mode::VIRT_ADDR
        | mr_mode::ALLOCATED
        | mr_mode::PROV_KEY
        | mr_mode::ENDPOINT;
    // For peers on other hosts only: `efa` then has no shared memory beside its device, and a
    // descriptor to sleep on.
    if provider == Some("efa") {
        caps |= flag::REMOTE_COMM;
    }
    // One without the other is refused.
    if hmem {
        caps |= flag::HMEM;
        ways |= mr_mode::HMEM;
    }
    (caps, ways)
}

/// Whether an entry with these takes memory of GPUs.
fn takes_gpus(caps: u64, ways: i32) -> bool {
    caps & flag::HMEM != 0 && ways & mr_mode::HMEM != 0
}

/// All that a provider (or any, without a name) offers for what is wanted here: reliable unconnected
/// endpoints with messages, remote writes and reads, delivery reported when it is complete. `hmem`:
/// only what takes memory of GPUs too.
pub(super) fn query(
    api: &Api,
    provider: Option<&str>,
    hmem: bool,
) -> Result<Vec<OwnedInfo>, DomainError> {
    // SAFETY: hints and results are entries of the library's own; strings put into hints come from
    // the allocator that fi_freeinfo frees them with.
    unsafe {
        let hints = (api.fns.dupinfo)(null());
        if hints.is_null() {
            return Err(api.fail("fi_allocinfo", libc::ENOMEM.into()));
        }
        let h = &mut *hints;
        let (caps, ways) = wanted(provider, hmem);
        h.caps = caps;
        h.mode = mode::CONTEXT | mode::CONTEXT2 | mode::RX_CQ_DATA;
        (*h.ep_attr).kind = fi::EP_RDM;
        (*h.tx_attr).op_flags = flag::DELIVERY_COMPLETE;
        let domain = &mut *h.domain_attr;
        domain.mr_mode = ways;
        domain.threading = fi::THREAD_DOMAIN;
        domain.control_progress = fi::PROGRESS_MANUAL;
        domain.data_progress = fi::PROGRESS_MANUAL;
        domain.resource_mgmt = fi::RM_ENABLED;
        if let Some(name) = provider {
            let name = std::ffi::CString::new(name).unwrap_or_default();
            (*h.fabric_attr).prov_name = libc::strdup(name.as_ptr());
        }
        let mut list: *mut fi::Info = null_mut();
        let code = (api.fns.getinfo)(api.api, null(), null(), 0, hints, &mut list);
        (api.fns.freeinfo)(hints);
        if code != 0 {
            return Err(api.fail("fi_getinfo", code.into()));
        }
        let mut all = Vec::new();
        let mut at = list;
        while !at.is_null() {
            let raw = (api.fns.dupinfo)(at);
            if !raw.is_null() {
                // The default for operations that don't say; all of ours say.
                (*(*raw).tx_attr).op_flags = 0;
                all.push(OwnedInfo { api: *api, raw, offer: read(raw) });
            }
            at = (*at).next;
        }
        (api.fns.freeinfo)(list);
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_gpus_is_asked_for_with_the_way_to_register_it() {
        for provider in [None, Some("efa"), Some("verbs;ofi_rxm")] {
            let (plain, ways) = wanted(provider, false);
            assert!(!takes_gpus(plain, ways) && plain & flag::HMEM == 0);
            let (caps, more) = wanted(provider, true);
            assert!(takes_gpus(caps, more));
            assert_eq!((caps & !flag::HMEM, more & !mr_mode::HMEM), (plain, ways));
            assert!(!takes_gpus(caps, ways) && !takes_gpus(plain, more));
        }
    }
}
