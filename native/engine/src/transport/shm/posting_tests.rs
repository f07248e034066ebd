//! Small writes that a link carries out within the call.

use super::link_tests::{byte, Pair, KEY};
use crate::domain::{Completion, Count, Domain, DomainError, LocalAddr, Post, SmallWrite, Token};

#[test]
fn ic_2_small_writes_are_counted_once_all_are_there_and_only_within_their_region() {
    let mut pair = Pair::new();
    let (memory, _mapping) = pair.expose_memory();
    let from = [7u8; 16];
    let write = |remote_offset, len| {
        let local = LocalAddr(from.as_ptr() as usize);
        SmallWrite { local, local_region: 0, remote: KEY, remote_offset, len }
    };
    let (link, token, three) = (pair.own_link, Token::default(), Some(Count { imm: 5, n: 3 }));
    for outside in [(4090, 7), (u64::MAX, 2)] {
        let writes = [write(0, 8), write(outside.0, outside.1)];
        assert_eq!(pair.a.write_small(link, token, &writes, three), None);
    }
    let writes = [write(16, 8), write(32, 16), write(4095, 1)];
    assert_eq!(pair.a.write_small(link, token, &writes, three), Some(Post::Done));
    pair.poll_b();
    assert!(matches!(pair.from_b[..], [.., Completion::Count(Count { imm: 5, n: 3 })]));
    let counts = pair.from_b.iter().filter(|c| matches!(c, Completion::Count(_))).count();
    assert_eq!(counts, 1, "what was refused counts nothing");
    let expected = |at| match at {
        0..8 | 16..24 | 32..48 | 4095 => 7,
        _ => 0,
    };
    assert!((0..4096).all(|at| byte(&memory, at) == expected(at)));
}

#[test]
fn ic_4_a_small_write_to_a_peer_that_has_left_fails() {
    let mut pair = Pair::new();
    // Like a broken socket: `b` does not know yet.
    let cause = DomainError::LinkDown("its connection was reset".into());
    pair.a.on_connection_lost(pair.own_link, cause, &mut pair.from_a);
    let (token, count) = (Token { slot: 2, ..Token::default() }, Some(Count { imm: 2, n: 9 }));
    let mut post = || pair.b.write_small(pair.peer_link, token, &[], count);
    assert_eq!((post(), post()), (Some(Post::Queued), None));
    for _ in 0..3 {
        pair.poll_a();
        pair.poll_b();
    }
    assert!(!pair.from_a.iter().any(|c| matches!(c, Completion::Count(_))));
    let is_loss = |result: &Result<(), DomainError>| result.as_ref().is_err_and(|e| e.is_loss());
    let failed = pair.from_b.iter().filter(|c| match c {
        Completion::Done { token, result, .. } => token.slot == 2 && is_loss(result),
        _ => false,
    });
    assert_eq!(failed.count(), 1, "{:?}", pair.from_b);
}
