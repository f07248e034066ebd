//! Objects and their function tables, as of version 1.14.

use std::ffi::{c_char, c_int, c_void};

use super::types::{AvAttr, CqAttr, CqErrEntry, FiAddr, Info, MrAttr, Msg, MsgRma};

/// Whether a table is long enough to hold the function at byte `offset`.
#[must_use]
pub fn has(size: usize, offset: usize) -> bool {
    size > offset
}

/// A function that this crate does not call.
pub type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
#[derive(Debug)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *mut Ops,
}

#[repr(C)]
#[derive(Debug)]
pub struct Ops {
    pub size: usize,
    pub close: unsafe extern "C" fn(fid: *mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(fid: *mut Fid, other: *mut Fid, flags: u64) -> c_int,
    pub control: unsafe extern "C" fn(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int,
    pub ops_open: Unused,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsFabric {
    pub size: usize,
    pub domain: unsafe extern "C" fn(
        fabric: *mut FidFabric,
        info: *mut Info,
        domain: *mut *mut FidDomain,
        context: *mut c_void,
    ) -> c_int,
    pub passive_ep: Unused,
    pub eq_open: Unused,
    pub wait_open: Unused,
    pub trywait:
        unsafe extern "C" fn(fabric: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidFabric {
    pub fid: Fid,
    pub ops: *mut OpsFabric,
    pub api_version: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsDomain {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(
        domain: *mut FidDomain,
        attr: *mut AvAttr,
        av: *mut *mut FidAv,
        context: *mut c_void,
    ) -> c_int,
    pub cq_open: unsafe extern "C" fn(
        domain: *mut FidDomain,
        attr: *mut CqAttr,
        cq: *mut *mut FidCq,
        context: *mut c_void,
    ) -> c_int,
    pub endpoint: unsafe extern "C" fn(
        domain: *mut FidDomain,
        info: *mut Info,
        ep: *mut *mut FidEp,
        context: *mut c_void,
    ) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsMr {
    pub size: usize,
    pub reg: Unused,
    pub regv: Unused,
    pub regattr: unsafe extern "C" fn(
        domain: *mut Fid,
        attr: *const MrAttr,
        flags: u64,
        mr: *mut *mut FidMr,
    ) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidDomain {
    pub fid: Fid,
    pub ops: *mut OpsDomain,
    pub mr: *mut OpsMr,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidMr {
    pub fid: Fid,
    pub desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsAv {
    pub size: usize,
    pub insert: unsafe extern "C" fn(
        av: *mut FidAv,
        addr: *const c_void,
        count: usize,
        fi_addr: *mut FiAddr,
        flags: u64,
        context: *mut c_void,
    ) -> c_int,
    pub insertsvc: Unused,
    pub insertsym: Unused,
    pub remove: unsafe extern "C" fn(
        av: *mut FidAv,
        fi_addr: *mut FiAddr,
        count: usize,
        flags: u64,
    ) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidAv {
    pub fid: Fid,
    pub ops: *mut OpsAv,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidWait {
    pub fid: Fid,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsCq {
    pub size: usize,
    pub read: unsafe extern "C" fn(cq: *mut FidCq, buf: *mut c_void, count: usize) -> isize,
    pub readfrom: Unused,
    pub readerr: unsafe extern "C" fn(cq: *mut FidCq, buf: *mut CqErrEntry, flags: u64) -> isize,
    pub sread: Unused,
    pub sreadfrom: Unused,
    pub signal: Unused,
    pub strerror: unsafe extern "C" fn(
        cq: *mut FidCq,
        prov_errno: c_int,
        err_data: *const c_void,
        buf: *mut c_char,
        len: usize,
    ) -> *const c_char,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidCq {
    pub fid: Fid,
    pub ops: *mut OpsCq,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsEp {
    pub size: usize,
    pub cancel: unsafe extern "C" fn(fid: *mut Fid, context: *mut c_void) -> isize,
    pub getopt: unsafe extern "C" fn(
        fid: *mut Fid,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut usize,
    ) -> c_int,
    pub setopt: unsafe extern "C" fn(
        fid: *mut Fid,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: usize,
    ) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsCm {
    pub size: usize,
    pub setname: Unused,
    pub getname: unsafe extern "C" fn(fid: *mut Fid, addr: *mut c_void, len: *mut usize) -> c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsMsg {
    pub size: usize,
    pub recv: Unused,
    pub recvv: Unused,
    pub recvmsg: unsafe extern "C" fn(ep: *mut FidEp, msg: *const Msg, flags: u64) -> isize,
    pub send: Unused,
    pub sendv: Unused,
    pub sendmsg: unsafe extern "C" fn(ep: *mut FidEp, msg: *const Msg, flags: u64) -> isize,
}

#[repr(C)]
#[derive(Debug)]
pub struct OpsRma {
    pub size: usize,
    pub read: Unused,
    pub readv: Unused,
    pub readmsg: unsafe extern "C" fn(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize,
    pub write: Unused,
    pub writev: Unused,
    pub writemsg: unsafe extern "C" fn(ep: *mut FidEp, msg: *const MsgRma, flags: u64) -> isize,
}

#[repr(C)]
#[derive(Debug)]
pub struct FidEp {
    pub fid: Fid,
    pub ops: *mut OpsEp,
    pub cm: *mut OpsCm,
    pub msg: *mut OpsMsg,
    pub rma: *mut OpsRma,
}
