//! The Unix socket beside the rings: handshake, region resolution with descriptors, and liveness.
//! The socket is SOCK_SEQPACKET, so a frame is a packet.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType,
    },
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{
    api::{Envelope, RegionKey, TransportKind},
    domain::DomainError,
    transport::handshake::MAX_MESSAGE,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRsc", "a control frame", 4096);

/// Descriptors per frame.
const MAX_FDS: usize = 4;

/// Sent once the peer is proven, with three descriptors: inbox, doorbell memory, eventfd.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct LinkSetup {
    /// Address of random bytes in the sender's memory, to test process_vm_readv.
    pub probe_addr: u64,
    pub probe: [u8; 16],
}

/// Frames of a link that is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Frame {
    Setup(LinkSetup),
    /// Requests access to a region; the key authorises the request.
    Resolve(RegionKey),
    /// Grants access: the memory is attached as a descriptor, and the region starts at `offset`.
    Mapped {
        key: RegionKey,
        len: u64,
        allocation: u64,
        allocation_len: u64,
        offset: u64,
    },
    /// Grants access: the region is at `addr` in the sender's process.
    Foreign {
        key: RegionKey,
        len: u64,
        addr: u64,
    },
    Unknown {
        key: RegionKey,
        reason: String,
    },
    /// Grants access: CUDA maps the allocation by this handle, and the region starts at `offset`.
    Device {
        key: RegionKey,
        len: u64,
        handle: Vec<u8>,
        uuid: [u8; 16],
        offset: u64,
        /// Address of the allocation in the sender's process.
        base: u64,
    },
    /// Revokes access to a region.
    Revoke {
        index: u32,
    },
    /// Answers a revocation: the sender can't access the region any more (MR-1).
    Revoked {
        index: u32,
    },
    Close {
        reason: String,
    },
    /// A message of the layer above this transport.
    ControlMessage(Vec<u8>),
    /// Denies access: the region is granted to another engine.
    Denied {
        key: RegionKey,
        reason: String,
    },
}

impl Frame {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }
}

pub(super) type Fds = SmallVec<[OwnedFd; MAX_FDS]>;

/// The socket name of an engine: abstract, so it is visible only in its network namespace.
pub(super) fn socket_name(kind: TransportKind, id: &crate::api::EngineId) -> String {
    let hex: String = id.0.iter().map(|b| format!("{b:02x}")).collect();
    match kind {
        TransportKind::Shm => format!("fabric-ray/{hex}"),
        kind => format!("fabric-ray/{kind}/{hex}"),
    }
}

fn new_socket() -> Result<OwnedFd, DomainError> {
    net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(DomainError::io("socket(AF_UNIX)"))
}

/// Connections that wait to be accepted; Linux allows 4096 by default. Strangers fill it as well.
const BACKLOG: i32 = 4096;
/// A peer whose queue is full is asked again: it accepts thousands a second once it runs.
const FULL_QUEUE_RETRIES: u32 = 20;
const FULL_QUEUE_PAUSE: std::time::Duration = std::time::Duration::from_millis(5);

pub(super) fn listen(name: &str) -> Result<OwnedFd, DomainError> {
    let socket = new_socket()?;
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(DomainError::io("abstract socket name"))?;
    net::bind(&socket, &addr).map_err(DomainError::io("bind(AF_UNIX)"))?;
    net::listen(&socket, BACKLOG).map_err(DomainError::io("listen(AF_UNIX)"))?;
    Ok(socket)
}

fn send_one(socket: BorrowedFd<'_>, frame: &[u8], fds: &Fds) -> Result<(), Errno> {
    let fds: SmallVec<[BorrowedFd<'_>; MAX_FDS]> = fds.iter().map(|f| f.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    net::sendmsg(socket, &[IoSlice::new(frame)], &mut ancillary, flags).map(drop)
}

/// Replies with descriptors that may wait for a peer before its further requests are left in the
/// kernel. Honest peers stay below it: see [`super::link::MAX_RESOLVING`].
pub(super) const MAX_PENDING_REPLIES: usize = 64;

#[derive(Debug)]
struct UnsentFrame {
    frame: Vec<u8>,
    fds: Fds,
    kind: FrameKind,
}

/// Why a frame is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    Own,
    /// It answers a request of the peer.
    Reply,
    /// It answers a revocation. It does not suspend reading: two peers that revoke many regions at
    /// once would wait for each other.
    Confirmation,
}

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct ControlSocket {
    socket: OwnedFd,
    /// Frames that the socket had no room for.
    unsent: VecDeque<UnsentFrame>,
    /// Numbers of replies and of confirmations among them.
    pending_replies: usize,
    pending_confirmations: usize,
    /// Whether nothing more is sent.
    send_closed: bool,
}

/// The peer has closed the connection.
#[derive(Debug)]
pub(super) struct Disconnected(pub String);

impl ControlSocket {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            unsent: VecDeque::new(),
            pending_replies: 0,
            pending_confirmations: 0,
            send_closed: false,
        }
    }

    pub fn connect(name: &str) -> Result<Self, DomainError> {
        let socket = new_socket()?;
        let addr = SocketAddrUnix::new_abstract_name(name.as_bytes())
            .map_err(DomainError::io("abstract socket name"))?;
        let mut tries = 0..FULL_QUEUE_RETRIES;
        let connected = loop {
            match net::connect(&socket, &addr) {
                Err(Errno::AGAIN) if tries.next().is_some() => {
                    std::thread::sleep(FULL_QUEUE_PAUSE);
                }
                connected => break connected,
            }
        };
        connected.map_err(|e| match e {
            Errno::CONNREFUSED => DomainError::LinkDown(
                "no process listens under its name in this network namespace: it has ended, or runs \
                on another host or in another container"
                    .into(),
            ),
            Errno::AGAIN => DomainError::LinkDown("its queue of new connections is full".into()),
            errno => DomainError::Io { call: "connect(AF_UNIX)", errno },
        })?;
        Ok(Self::new(socket))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The peer's process id in this process's namespace.
    pub fn peer_pid(&self) -> Option<i32> {
        let cred = net::sockopt::socket_peercred(&self.socket).ok()?;
        Some(cred.pid.as_raw_nonzero().get())
    }

    /// The peer's user, if it isn't this process's. Abstract names have no permissions, so any
    /// process in the network namespace may connect.
    pub fn other_user(&self) -> Option<u32> {
        let cred = net::sockopt::socket_peercred(&self.socket).ok();
        let (own, peer) = (rustix::process::geteuid(), cred.map(|c| c.uid));
        (peer != Some(own)).then(|| peer.map_or(u32::MAX, |uid| uid.as_raw()))
    }

    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a frame now or once there is room; drops it after `finish`.
    pub fn send(&mut self, frame: Vec<u8>, fds: Fds) -> Result<(), Disconnected> {
        self.queue(UnsentFrame { frame, fds, kind: FrameKind::Own })
    }

    /// Sends a frame that answers a request of the peer.
    pub fn reply(&mut self, frame: Vec<u8>, fds: Fds) -> Result<(), Disconnected> {
        self.queue(UnsentFrame { frame, fds, kind: FrameKind::Reply })
    }

    /// Sends a frame that answers a revocation.
    pub fn confirm(&mut self, frame: Vec<u8>) -> Result<(), Disconnected> {
        self.queue(UnsentFrame { frame, fds: Fds::new(), kind: FrameKind::Confirmation })
    }

    /// Answers to revocations that the peer has not read.
    pub fn pending_confirmations(&self) -> usize {
        self.pending_confirmations
    }

    /// The number of waiting frames of a kind that is counted.
    fn pending(&mut self, kind: FrameKind) -> Option<&mut usize> {
        match kind {
            FrameKind::Own => None,
            FrameKind::Reply => Some(&mut self.pending_replies),
            FrameKind::Confirmation => Some(&mut self.pending_confirmations),
        }
    }

    fn queue(&mut self, unsent: UnsentFrame) -> Result<(), Disconnected> {
        if self.send_closed {
            return Ok(());
        }
        if let Some(n) = self.pending(unsent.kind) {
            *n += 1;
        }
        self.unsent.push_back(unsent);
        self.flush()
    }

    /// Whether too many replies wait for the peer. Reading more of its requests would make this
    /// process hold ever more replies and descriptors.
    pub fn is_throttled(&self) -> bool {
        self.pending_replies >= MAX_PENDING_REPLIES
    }

    pub fn flush(&mut self) -> Result<(), Disconnected> {
        while let Some(UnsentFrame { frame, fds, kind }) = self.unsent.front() {
            match send_one(self.socket.as_fd(), frame, fds) {
                Ok(()) => {
                    let kind = *kind;
                    self.unsent.pop_front();
                    if let Some(n) = self.pending(kind) {
                        *n -= 1;
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => {
                    // The peer receives nothing more; frames that it sent before are still read.
                    self.drop_unsent();
                    return Err(Disconnected(e.to_string()));
                }
            }
        }
        Ok(())
    }

    fn drop_unsent(&mut self) {
        self.unsent.clear();
        (self.pending_replies, self.pending_confirmations) = (0, 0);
    }

    /// Closes the sending side. The peer sees that, and can still send.
    pub fn finish(&mut self) {
        let _ = self.flush();
        // The kernel reports a shut socket as writable forever.
        self.drop_unsent();
        self.send_closed = true;
        let _ = net::shutdown(&self.socket, net::Shutdown::Write);
    }

    /// The next frame with its descriptors, if any.
    pub fn receive(&mut self) -> Result<Option<(Vec<u8>, Fds)>, DomainError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got =
            net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags);
        let n = match got {
            // The kernel drops descriptors that this process has no room for.
            Ok(m) if m.flags.contains(ReturnFlags::CTRUNC) => {
                return Err(DomainError::Io { call: "recvmsg(SCM_RIGHTS)", errno: Errno::MFILE });
            }
            Ok(m) => m.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(DomainError::LinkDown(e.to_string())),
        };
        let fds = ancillary
            .drain()
            .filter_map(|m| match m {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if n == 0 {
            let cause = "the peer's process has ended or closed the connection";
            return Err(DomainError::LinkDown(cause.into()));
        }
        bytes.truncate(n);
        Ok(Some((bytes, fds)))
    }
}
