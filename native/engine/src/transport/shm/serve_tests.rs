//! Links of two domains, poll by poll.

use super::ShmDomain;
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, TransportKind},
    domain::{
        Admit, Completion, Count, Domain, DomainError, LinkId, MessageRoom, Token, WorkRequest,
    },
    time::Time,
    wake::Waker,
};

struct NoRoom;

impl MessageRoom for NoRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Wait
    }
}

fn domain() -> (ShmDomain, EngineAddress) {
    let id = EngineId(std::array::from_fn(|_| fastrand::u8(..)));
    let waker = Waker::default();
    let mut domain =
        ShmDomain::open(TransportKind::Shm, id, &EngineConfig::default(), &waker).unwrap();
    let address = EngineAddress { id, name: String::new(), endpoints: vec![domain.endpoint()] };
    domain.announce(&address);
    (domain, address)
}

fn link_up(out: &[Completion]) -> Option<LinkId> {
    out.iter().find_map(|c| match c {
        Completion::LinkUp { link, .. } => Some(*link),
        _ => None,
    })
}

#[test]
fn ic_4_a_count_that_comes_after_its_link_has_ended_is_no_success() {
    let ((mut a, _), (mut b, there)) = (domain(), domain());
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    a.connect(Time(1), &there, 0).unwrap();
    let mut now = Time(1);
    let (mine, theirs) = loop {
        now = now.after(std::time::Duration::from_millis(1));
        a.poll(now, &NoRoom, &mut of_a);
        b.poll(now, &NoRoom, &mut of_b);
        if let (Some(mine), Some(theirs)) = (link_up(&of_a), link_up(&of_b)) {
            break (mine, theirs);
        }
    };
    let count = |imm| WorkRequest::Count(Count { imm, n: 1 });
    let token = |slot| Token { slot, ..Token::default() };
    b.post(theirs, token(1), &count(1)).unwrap();
    // As when its socket is broken: `b` has yet to learn of it.
    a.fail(mine, DomainError::LinkDown("its connection was reset".into()), &mut of_a);
    b.post(theirs, token(2), &count(2)).unwrap();
    for _ in 0..3 {
        now = now.after(std::time::Duration::from_millis(1));
        a.poll(now, &NoRoom, &mut of_a);
        b.poll(now, &NoRoom, &mut of_b);
    }
    let counted: Vec<u32> = of_a
        .iter()
        .filter_map(|c| match c {
            Completion::Count(count) => Some(count.imm),
            _ => None,
        })
        .collect();
    assert_eq!(counted, [1]);
    let failed = of_b.iter().any(|c| {
        matches!(c, Completion::Done { token, result: Err(e), .. } if token.slot == 2 && e.is_loss())
    });
    assert!(failed, "{of_b:?}");
}
