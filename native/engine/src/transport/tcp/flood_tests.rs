//! Peers that send more than they may: their own links end, and no others.

use super::{link::MAX_OPS, throttle_tests::End};
use crate::{
    domain::{Completion, Domain, LinkId},
    time::Time,
    transport::staged::ControlChannel,
};

/// Peers of one domain, each with the domain's link to it.
fn joined<const N: usize>() -> ([End; N], End, Vec<LinkId>, Time) {
    let mut peers: [End; N] = std::array::from_fn(|i| End::new(i as u8 + 1).0);
    let (mut own, address) = End::new(N as u8 + 1);
    let (mut links, mut now) = (Vec::new(), Time(1));
    for peer in &mut peers {
        own.link = 0;
        peer.domain.connect(now, &address, 0).unwrap();
        while peer.link == 0 || own.link == 0 {
            peer.poll(&mut now);
            own.out.clear();
            own.poll(&mut now);
        }
        links.push(own.link);
    }
    (peers, own, links, now)
}

/// A peer may send as many in one poll as its streams hold.
#[test]
fn rs_4_control_messages_of_one_peer_end_no_link_of_another() {
    let ([mut peer, mut hostile], mut own, links, mut now) = joined();
    own.domain.link(links[1]).unwrap().control_messages = MAX_OPS + 1;
    own.domain.control_messages.extend((0..=MAX_OPS).map(|_| (links[1], Vec::new())));
    peer.domain.send_control(peer.link, b"honest".to_vec());
    hostile.domain.send_control(hostile.link, b"one more".to_vec());
    own.out.clear();
    let is_down = |end: &End| end.out.iter().any(|c| matches!(c, Completion::LinkDown { .. }));
    for _ in 0..20_000 {
        if is_down(&own) && own.domain.control_messages.len() == MAX_OPS + 2 {
            break;
        }
        peer.poll(&mut now);
        hostile.poll(&mut now);
        own.poll(&mut now);
    }
    let down = |c: &Completion| match c {
        Completion::LinkDown { link, cause, .. } => Some((*link, cause.to_string())),
        _ => None,
    };
    let down: Vec<_> = own.out.iter().filter_map(down).collect();
    assert!(
        matches!(&down[..], [(link, cause)] if *link == links[1] && cause.contains("too many"))
    );
    let taken = std::iter::from_fn(|| own.domain.receive_control());
    assert_eq!(taken.last(), Some((links[0], b"honest".to_vec())));
    assert_eq!(own.domain.link(links[0]).unwrap().control_messages, 0);
}
