//! Peers that report operations as done before they are.

use super::{
    bulk_tests::post,
    frame::{Header, Kind},
    throttle_tests::{joined, End},
    StreamKey, TcpDomain,
};
use crate::{domain::Completion, time::Time};

/// The sockets of one stream of the link, at both ends.
fn sockets_of(a: &End, b: &End, stream: usize) -> [StreamKey; 2] {
    [a, b].map(|end| end.domain.links[TcpDomain::slot(end.link)].streams[stream].unwrap())
}

/// Sends a frame from `b` that `b` itself would not send.
fn forge(b: &End, key: StreamKey, header: &Header) {
    let frame = header.encode();
    assert_eq!(rustix::io::write(b.domain.sockets[key].stream.fd(), &frame), Ok(frame.len()));
}

/// Polls `a` until its link is down; returns the cause.
fn end_of_link(a: &mut End, now: &mut Time) -> String {
    loop {
        a.poll(now);
        let down = a.out.iter().find_map(|c| match c {
            Completion::LinkDown { cause, .. } => Some(cause.to_string()),
            _ => None,
        });
        assert_eq!(a.done(), 0, "an operation succeeded that the peer has not carried out");
        if let Some(cause) = down {
            return cause;
        }
    }
}

#[test]
fn mr_1_a_write_whose_bytes_are_not_sent_can_not_be_acknowledged() {
    let (mut a, b, mut now) = joined();
    let [from, to] = sockets_of(&a, &b, 1);
    let mut posted = 0;
    // `b` reads nothing: at last the socket takes no more.
    while !a.domain.sockets[from].stream.blocked {
        post(&mut a, posted);
        posted += 1;
    }
    let (unsent, writes) = a.domain.sockets[from].stream.backlog();
    assert!(unsent > 0 && writes > 1, "{unsent} bytes of {writes} writes");
    forge(&b, to, &Header { op: writes as u64, ..Header::new(Kind::Ack) });
    let cause = end_of_link(&mut a, &mut now);
    assert!(cause.contains("acknowledgement of a frame that was not sent"), "{cause}");
}

#[test]
fn mr_1_the_result_of_a_message_ends_neither_a_write_nor_a_read() {
    // The first operation with a number, and the first without: see `Link::open_op`.
    for (op, is_read) in [(1 << 32, false), ((1 << 63) | (1 << 32), true)] {
        let (mut a, b, mut now) = joined();
        match is_read {
            true => assert!(a.read_all() > 0),
            false => post(&mut a, 0),
        }
        let [_, to] = sockets_of(&a, &b, 0);
        forge(&b, to, &Header { op, ..Header::new(Kind::MessageResult) });
        let cause = end_of_link(&mut a, &mut now);
        assert!(cause.contains("result of a message that was not sent"), "{cause}");
    }
}
