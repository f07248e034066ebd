//! Texts for completion statuses and device events, with a hint for the user.

use fabric_sys::ibverbs as sys;

/// Text of a completion's status.
pub(super) fn status(wc: &sys::Wc) -> String {
    let what = match wc.status {
        0 => "success",
        1 => "local length error: the request is longer than the port takes",
        2 => "local queue pair error: the port may be down, or the request is malformed",
        4 => "local protection error: the local memory is not registered any more",
        5 => "flushed: the queue pair had failed before",
        7 => "bad response from the peer's NIC",
        8 => "local access error: the peer's message did not fit its slot",
        9 => "the peer's NIC reports an invalid request",
        10 => "remote access error: the peer's NIC refuses the key or the range",
        11 => "the peer's NIC could not carry out the request",
        12 => {
            "the peer's NIC did not acknowledge: transport retry counter exceeded (its process is \
             gone, its link is down, or the network loses packets)"
        }
        13 => "the peer was not ready to receive: retry counter exceeded",
        19 => "fatal error of the NIC: see dmesg",
        20 => "no response in time",
        _ => "general error",
    };
    format!("{what} (status {}, vendor 0x{:x})", wc.status, wc.vendor_err)
}

/// Text of a device event.
pub(super) fn event(kind: u32) -> &'static str {
    match kind {
        sys::EVENT_CQ_ERR => "a completion queue failed",
        sys::EVENT_QP_FATAL => "the queue pair failed",
        sys::EVENT_QP_REQ_ERR => "the peer sent an invalid request",
        sys::EVENT_QP_ACCESS_ERR => "the peer's access was refused: its key or range is wrong",
        sys::EVENT_DEVICE_FATAL => "the NIC failed: see dmesg",
        sys::EVENT_PORT_ERR => "the port went down: see `ibv_devinfo` and `ip link`",
        _ => "the NIC reported an event",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_a_text_and_the_vendor_code() {
        let wc = sys::Wc { status: sys::WC_RETRY_EXC_ERR, vendor_err: 0x81, ..Default::default() };
        let label = status(&wc);
        assert!(label.contains("did not acknowledge") && label.contains("vendor 0x81"), "{label}");
        let unknown = status(&sys::Wc { status: 77, ..Default::default() });
        assert!(unknown.contains("status 77"), "{unknown}");
    }
}
