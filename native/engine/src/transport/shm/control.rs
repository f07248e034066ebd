//! The Unix socket beside the rings: handshake, region resolution with descriptors attached, and
//! the sign of life. Sequenced packets, so that a frame is a packet.

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

/// How many descriptors one frame may carry.
const MAX_FDS: usize = 4;

/// Sent once the other side is proven; three descriptors go along: inbox, bell, eventfd.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    /// Where a random probe lies in the sender's memory, to find out whether process_vm_readv works.
    pub probe_addr: u64,
    pub probe: [u8; 16],
}

/// What the two ends say once the link is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Frame {
    Setup(Setup),
    /// May I reach this region? The key is the right to ask.
    Resolve(RegionKey),
    /// You may: its memory comes as a descriptor, the region begins `offset` bytes into it.
    Mapped {
        key: RegionKey,
        len: u64,
        allocation: u64,
        allocation_len: u64,
        offset: u64,
    },
    /// You may: it lies at `addr` in my process.
    Foreign {
        key: RegionKey,
        len: u64,
        addr: u64,
    },
    Unknown {
        key: RegionKey,
        reason: String,
    },
    /// You may: CUDA maps its allocation by this handle, the region begins `offset` bytes into it.
    Device {
        key: RegionKey,
        len: u64,
        handle: Vec<u8>,
        uuid: [u8; 16],
        offset: u64,
        /// Where the allocation lies in my process.
        base: u64,
    },
    /// Let go of this region.
    Revoke {
        index: u32,
    },
    /// Done: nothing of mine can touch it any more (MR-1).
    Revoked {
        index: u32,
    },
    Bye {
        reason: String,
    },
    /// Something for the layer above this transport.
    Whisper(Vec<u8>),
    /// You may not: another engine may.
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

/// Where an engine listens: a name without a file, seen only within its network namespace.
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

pub(super) fn listen(name: &str) -> Result<OwnedFd, DomainError> {
    let socket = new_socket()?;
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(DomainError::io("abstract socket name"))?;
    net::bind(&socket, &addr).map_err(DomainError::io("bind(AF_UNIX)"))?;
    net::listen(&socket, 1024).map_err(DomainError::io("listen(AF_UNIX)"))?;
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

/// Replies that a peer may leave untaken, with a descriptor each, before its further requests stay in the kernel. Honest
/// peers don't come near it: see [`super::link::MOST_ASKED`].
pub(super) const MOST_OWED: usize = 64;

#[derive(Debug)]
struct Unsent {
    frame: Vec<u8>,
    fds: Fds,
    /// It answers a request of the peer's.
    is_reply: bool,
}

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct Control {
    socket: OwnedFd,
    /// Frames that the socket had no room for.
    unsent: VecDeque<Unsent>,
    /// Replies among them.
    owed: usize,
    /// Nothing more is said.
    finished: bool,
}

/// The other end is gone.
#[derive(Debug)]
pub(super) struct Gone(pub String);

impl Control {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, unsent: VecDeque::new(), owed: 0, finished: false }
    }

    pub fn connect(name: &str) -> Result<Self, DomainError> {
        let socket = new_socket()?;
        let addr = SocketAddrUnix::new_abstract_name(name.as_bytes())
            .map_err(DomainError::io("abstract socket name"))?;
        net::connect(&socket, &addr).map_err(|e| match e {
            Errno::CONNREFUSED => DomainError::LinkDown(
                "nobody listens under its name in this network namespace: it has ended, or runs \
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

    /// The process at the other end, as the kernel sees it from here.
    pub fn peer_pid(&self) -> Option<i32> {
        let cred = net::sockopt::socket_peercred(&self.socket).ok()?;
        Some(cred.pid.as_raw_nonzero().get())
    }

    /// The user at the other end, if it isn't this process's. Names without a file have no permissions, so
    /// that anybody in the network namespace can be there.
    pub fn other_user(&self) -> Option<u32> {
        let cred = net::sockopt::socket_peercred(&self.socket).ok();
        let (own, peer) = (rustix::process::geteuid(), cred.map(|c| c.uid));
        (peer != Some(own)).then(|| peer.map_or(u32::MAX, |uid| uid.as_raw()))
    }

    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a frame now or as soon as there is room; forgotten after `finish`.
    pub fn send(&mut self, frame: Vec<u8>, fds: Fds) -> Result<(), Gone> {
        self.queue(Unsent { frame, fds, is_reply: false })
    }

    /// As `send`, for what the peer has asked for.
    pub fn reply(&mut self, frame: Vec<u8>, fds: Fds) -> Result<(), Gone> {
        self.queue(Unsent { frame, fds, is_reply: true })
    }

    fn queue(&mut self, unsent: Unsent) -> Result<(), Gone> {
        if self.finished {
            return Ok(());
        }
        self.owed += usize::from(unsent.is_reply);
        self.unsent.push_back(unsent);
        self.flush()
    }

    /// Whether the peer takes its replies so slowly that nothing more is read from it: it would have this process keep
    /// ever more of them, and their descriptors.
    pub fn stalls(&self) -> bool {
        self.owed >= MOST_OWED
    }

    pub fn flush(&mut self) -> Result<(), Gone> {
        while let Some(Unsent { frame, fds, is_reply }) = self.unsent.front() {
            match send_one(self.socket.as_fd(), frame, fds) {
                Ok(()) => {
                    self.owed -= usize::from(*is_reply);
                    self.unsent.pop_front();
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => {
                    // The peer takes nothing more; what it has said before it left is still heard.
                    self.forget();
                    return Err(Gone(e.to_string()));
                }
            }
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.unsent.clear();
        self.owed = 0;
    }

    /// Says nothing more: the other end hears that, and can still speak.
    pub fn finish(&mut self) {
        let _ = self.flush();
        // Of a socket that is shut, the kernel says for ever that it takes something.
        self.forget();
        self.finished = true;
        let _ = net::shutdown(&self.socket, net::Shutdown::Write);
    }

    /// The next frame with its descriptors; `None` if there is none yet.
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
            let cause = "its process has ended or closed the connection";
            return Err(DomainError::LinkDown(cause.into()));
        }
        bytes.truncate(n);
        Ok(Some((bytes, fds)))
    }
}
