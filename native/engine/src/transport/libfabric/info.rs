//! The library's `fi_info` entries, and the attributes that are used of them.

use std::{
    ffi::{c_char, CStr},
    net::{Ipv4Addr, Ipv6Addr},
    ptr::{null, null_mut},
};

use fabric_sys::libfabric::{self as fi, flag, mode, mr_mode};

use super::library::Api;
use crate::domain::DomainError;

/// The attributes of one entry.
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
    /// Whether it registers GPU memory.
    pub hmem: bool,
    pub auto_progress: bool,
    /// Bits per second; 0 if unknown.
    pub speed: u64,
    pub pci: Option<String>,
    pub down: bool,
}

impl Offer {
    /// Whether the NIC places bytes by itself, so that all access ends with the registration.
    pub fn is_rdma(&self) -> bool {
        let first = self.provider.split(';').next().unwrap_or_default();
        matches!(first, "efa" | "verbs" | "cxi")
    }

    pub fn is_efa(&self) -> bool {
        self.provider.split(';').next() == Some("efa")
    }

    /// Whether peers must be queried before an access rather than after a refusal. Some versions of
    /// the shm provider leave a refused operation hanging, and a verbs connection breaks with
    /// everything under way on it.
    pub fn hides_refusals(&self) -> bool {
        self.provider.split(';').any(|p| matches!(p, "shm" | "verbs"))
    }

    /// Whether closing must wait until peers are silent. `ofi_rxm` up to 2.6 reads pending data of
    /// a connection after closing it, and returns the buffers to freed memory, which can crash the
    /// process.
    pub fn closes_late(&self) -> bool {
        self.provider.split(';').any(|p| p == "ofi_rxm")
    }

    /// Whether it reaches this host only.
    pub fn is_local(&self) -> bool {
        match self.ip() {
            Some(std::net::IpAddr::V4(ip)) => ip.is_loopback(),
            Some(std::net::IpAddr::V6(ip)) => ip.is_loopback(),
            None => self.provider.split(';').next() == Some("shm"),
        }
    }

    /// Whether its address is link-local.
    pub fn is_link_local(&self) -> bool {
        matches!(self.ip(), Some(std::net::IpAddr::V6(ip)) if ip.is_unicast_link_local())
    }

    /// The NIC's IP address, if it has one.
    pub fn ip(&self) -> Option<std::net::IpAddr> {
        ip_of(self.addr_format, &self.source)
    }
}

/// The IP address in a C socket address.
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

// SAFETY: plain memory of the library, accessed through this owner only.
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

/// A string of the library; empty if it is missing.
///
/// # Safety
/// `s` is null or a C string that outlives the call.
unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract `s` is null or a string of the library.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// Reads the attributes of an entry.
///
/// # Safety
/// `raw` is an entry from fi_getinfo or fi_dupinfo.
unsafe fn read(raw: *const fi::Info) -> Offer {
    // SAFETY: entries have all their attributes; only `nic` and its parts may be missing.
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

/// The capabilities and registration modes to request.
fn requested(provider: Option<&str>, hmem: bool) -> (u64, i32) {
    let access = flag::READ | flag::WRITE | flag::REMOTE_READ | flag::REMOTE_WRITE;
    let mut caps = flag::MSG | flag::RMA | flag::SEND | flag::RECV | access;
    let mut ways = mr_mode::LOCAL
        | mr_mode::VIRT_ADDR
        | mr_mode::ALLOCATED
        | mr_mode::PROV_KEY
        | mr_mode::ENDPOINT;
    // Remote peers only: `efa` then uses no shared memory beside its device, and has a wait
    // descriptor.
    if provider == Some("efa") {
        caps |= flag::REMOTE_COMM;
    }
    // The library refuses one without the other.
    if hmem {
        caps |= flag::HMEM;
        ways |= mr_mode::HMEM;
    }
    (caps, ways)
}

/// Whether an entry supports GPU memory.
fn takes_gpus(caps: u64, ways: i32) -> bool {
    caps & flag::HMEM != 0 && ways & mr_mode::HMEM != 0
}

/// All entries of a provider (or of all) with the required capabilities: reliable unconnected
/// endpoints with messages, remote writes and reads, and delivery completion. `hmem`: only entries
/// that also support GPU memory.
pub(super) fn query(
    api: &Api,
    provider: Option<&str>,
    hmem: bool,
) -> Result<Vec<OwnedInfo>, DomainError> {
    // SAFETY: hints and results are entries of the library; strings in hints come from the
    // allocator that fi_freeinfo frees them with.
    unsafe {
        let hints = (api.fns.dupinfo)(null());
        if hints.is_null() {
            return Err(api.fail("fi_allocinfo", libc::ENOMEM.into()));
        }
        let h = &mut *hints;
        let (caps, ways) = requested(provider, hmem);
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
                // The default of operations without explicit flags; all operations have them.
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
    fn gpu_memory_is_requested_with_its_registration_mode() {
        for provider in [None, Some("efa"), Some("verbs;ofi_rxm")] {
            let (plain, ways) = requested(provider, false);
            assert!(!takes_gpus(plain, ways) && plain & flag::HMEM == 0);
            let (caps, more) = requested(provider, true);
            assert!(takes_gpus(caps, more));
            assert_eq!((caps & !flag::HMEM, more & !mr_mode::HMEM), (plain, ways));
            assert!(!takes_gpus(caps, ways) && !takes_gpus(plain, more));
        }
    }
}
