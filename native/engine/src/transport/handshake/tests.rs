use proptest::prelude::*;

use super::{
    failure::decode,
    messages::{Message, Welcome},
    *,
};
use crate::{
    api::{Endpoint, EngineId, TransportKind},
    domain::DomainError,
};

fn credentials(name: &str, token: &[u8]) -> Credentials {
    let id = EngineId::random().unwrap();
    let own = EngineAddress { id, name: name.into(), endpoints: Vec::new() };
    Credentials::new(own, Secret::new(Some(token)).unwrap())
}

fn with(secret: Secret, name: &str) -> Credentials {
    Credentials { secret, ..credentials(name, b"x") }
}

fn handshake(a: &Credentials, b: &Credentials, to: EngineId) -> Result<(), DomainError> {
    let (init, hello) = Initiator::start(a, to, vec![1]).unwrap();
    let (acc, welcome) = match Acceptor::on_hello(b, &hello) {
        Ok(x) => x,
        Err(f) => return init.on_welcome(&f.reply.unwrap()).map(drop).map_err(|f| f.error),
    };
    assert_eq!(acc.extra, [1]);
    let welcomed = init.on_welcome(&welcome).map_err(|f| f.error)?;
    let met = a.versions.common(b.versions);
    let accepted = acc.on_proof(&welcomed.proof).map_err(|f| f.error)?;
    let peer = welcomed.pending.on_accepted(&accepted).map_err(|f| f.error)?;
    assert_eq!((&acc.peer.address, &peer.address), (&a.own, &b.own));
    assert_eq!((acc.peer.version, peer.version), (met, met));
    let mut sealed = acc.session().seal(b"setup", b"what else");
    assert_eq!(welcomed.session.unseal(b"setup", &sealed).unwrap(), b"what else");
    assert!(welcomed.session.unseal(b"other", &sealed).is_err());
    assert!(welcomed.session.unseal(b"setup", &sealed[..20]).is_err());
    sealed[0] ^= 1;
    assert!(welcomed.session.unseal(b"setup", &sealed).is_err());
    Ok(())
}

#[test]
fn the_same_token_is_needed() {
    let (a, b) = (credentials("a", b"x"), credentials("b", b"x"));
    assert_eq!(handshake(&a, &b, b.own.id), Ok(()));
    let c = credentials("c", b"y");
    let Err(DomainError::Handshake(said)) = handshake(&a, &c, c.own.id) else { panic!("they met") };
    assert_eq!(said, "the tokens differ; give both engines the same token");
    let tokenless = with(Secret::User, "d");
    for (a, b) in [(&a, &tokenless), (&tokenless, &a)] {
        let Err(DomainError::Handshake(said)) = handshake(a, b, b.own.id) else {
            panic!("they met")
        };
        assert!(said.starts_with("one engine has a token and the other has none"), "{said}");
    }
}

#[test]
fn ic_2_without_a_token_the_users_key_is_needed() {
    let (a, b) = (with(Secret::User, "a"), with(Secret::User, "b"));
    assert_eq!(handshake(&a, &b, b.own.id), Ok(()));
    // A process that cannot open the key file has no key.
    let stranger = with(Secret::Kernel, "c");
    for (a, b) in [(&stranger, &b), (&a, &stranger)] {
        let Err(DomainError::Handshake(said)) = handshake(a, b, b.own.id) else {
            panic!("they met")
        };
        assert!(said.contains("of one user"), "{said}");
        assert!(said.contains("give both engines the same token"), "{said}");
    }
}

#[test]
fn an_initiator_that_has_not_proven_itself_gets_nothing_that_depends_on_the_token() {
    // Apart from the nonce, a welcome holds no bytes that depend on the token.
    let (a, b) = (credentials("a", b"one"), credentials("b", b"two"));
    let (_, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
    let (acceptor, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
    let Ok(Message::Welcome(said)) = decode(&welcome) else { panic!("no welcome") };
    let by_hand = Welcome { version: 1, from: (&b.own).into(), nonce: said.nonce, secret: 2 };
    assert!(welcome == Message::Welcome(by_hand).encode(), "the welcome has other fields");
    let refused = acceptor.on_proof(&Message::Proof([7; 32]).encode()).unwrap_err();
    let words = refused.error.to_string();
    assert!(words.contains("the tokens differ"), "{words}");
    let Ok(Message::Refusal(_)) = decode(&refused.reply.unwrap()) else { panic!("no refusal") };
}

#[test]
fn a_handshake_of_version_1_is_refused_in_that_version() {
    let b = credentials("b", b"x");
    let hello = super::messages::OUTDATED.seal(&[0, 1, 1]);
    let Err(refusal) = Acceptor::on_hello(&b, &hello) else { panic!("they met") };
    let reply = refusal.reply.unwrap();
    assert_eq!(reply[4..6], [1, 0], "the reply must have version 1");
    let words = b"the handshake has version 1 at the initiator and version 2 at the acceptor";
    assert!(reply.windows(words.len()).any(|w| w == words));
}

#[test]
fn an_acceptor_or_initiator_without_the_token_is_refused() {
    let (a, b, c) = (credentials("a", b"x"), credentials("b", b"x"), credentials("b", b"y"));
    let (_, hello) = Initiator::start(&c, b.own.id, vec![]).unwrap();
    let (acc, _) = Acceptor::on_hello(&b, &hello).unwrap();
    assert!(acc.on_proof(&Message::Proof([7; 32]).encode()).is_err());
    let (init, hello) = Initiator::start(&a, c.own.id, vec![]).unwrap();
    let (_, welcome) = Acceptor::on_hello(&c, &hello).unwrap();
    let welcomed = init.on_welcome(&welcome).unwrap();
    assert!(welcomed.pending.on_accepted(&Message::Accepted([7; 32]).encode()).is_err());
}

#[test]
fn mr_2_a_restart_under_the_same_name_is_stale() {
    let (a, b, again) = (credentials("a", b""), credentials("b", b""), credentials("b", b""));
    assert!(matches!(handshake(&a, &again, b.own.id), Err(DomainError::Stale(_))));
}

/// Credentials of a build that supports versions `oldest` to `newest`.
fn speaking(oldest: u16, newest: u16) -> Credentials {
    let versions = Versions { oldest, newest };
    Credentials { versions, ..credentials(&format!("v{newest}"), b"x") }
}

#[test]
fn builds_one_version_apart_connect_in_both_directions() {
    for ((a, b), met) in
        [(((1, 2), (2, 3)), 2), (((2, 3), (1, 2)), 2), (((1, 1), (1, 2)), 1), (((1, 2), (1, 1)), 1)]
    {
        let (a, b) = (speaking(a.0, a.1), speaking(b.0, b.1));
        assert_eq!(handshake(&a, &b, b.own.id), Ok(()));
        let (_, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        let (_, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
        let Ok(Message::Welcome(welcome)) = decode(&welcome) else { panic!("no welcome") };
        assert_eq!(welcome.version, met);
    }
}

#[test]
fn builds_further_apart_refuse_each_other_with_the_same_text_on_both_sides() {
    for (a, b) in [((1, 1), (3, 3)), ((3, 4), (1, 2))] {
        let (a, b) = (speaking(a.0, a.1), speaking(b.0, b.1));
        let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        let Err(refusal) = Acceptor::on_hello(&b, &hello) else { panic!("they met") };
        let Err(heard) = init.on_welcome(&refusal.reply.unwrap()) else { panic!("welcomed") };
        assert_eq!(refusal.error, heard.error);
        let said = heard.error.to_string();
        for (side, versions) in [(&a, a.versions), (&b, b.versions)] {
            assert!(said.contains(&versions.to_string()), "{said}");
            assert!(said.contains(&side.own.label()), "{said}");
        }
        assert!(said.contains("upgrade the older side"), "{said}");
    }
}

#[test]
fn an_endpoint_of_unknown_kind_keeps_its_index_and_bytes() {
    let at = |transport| Endpoint { transport, data: vec![1, 2] };
    let (mut a, mut b) = (credentials("a", b"x"), credentials("b", b"x"));
    for kinds in [&mut a, &mut b] {
        kinds.own.endpoints =
            [TransportKind::Shm, TransportKind::Unknown(1000), TransportKind::Tcp].map(at).into();
    }
    assert_eq!(handshake(&a, &b, b.own.id), Ok(()));
    let sent = EngineAddress::from_bytes(&b.own.to_bytes()).unwrap();
    assert_eq!((sent.first_of(TransportKind::Tcp), &sent), (2, &b.own));
}

#[test]
fn a_version_that_was_not_offered_is_refused() {
    let (a, b) = (speaking(1, 2), speaking(1, 3));
    let (init, _) = Initiator::start(&a, b.own.id, vec![]).unwrap();
    let from = (&b.own).into();
    let welcome = Welcome { version: 3, from, nonce: [3; 32], secret: 2 };
    let Err(failure) = init.on_welcome(&Message::Welcome(welcome).encode()) else {
        panic!("it was taken")
    };
    assert!(failure.reply.is_some());
    assert!(failure.error.to_string().contains("version 3 was chosen, 1 to 2 was offered"));
}

#[test]
fn a_welcome_that_was_changed_on_its_way_is_refused() {
    let (a, mut b) = (speaking(1, 3), speaking(1, 3));
    b.own.endpoints = vec![Endpoint { transport: TransportKind::Tcp, data: vec![1, 2, 3] }];
    type Change = (&'static str, fn(&mut Welcome));
    let changes: [Change; 5] = [
        ("version", |w| w.version ^= 1),
        ("name", |w| w.from.name.replace_range(..1, "w")),
        ("an endpoint", |w| w.from.endpoints[0].data[1] ^= 1),
        ("transport", |w| w.from.endpoints[0].kind ^= 1),
        ("nonce", |w| w.nonce[0] ^= 1),
    ];
    for (what, change) in changes {
        let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        let (acceptor, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
        let proof = init.on_welcome(&welcome).unwrap().proof;
        assert!(acceptor.on_proof(&proof).is_ok());
        let Ok(Message::Welcome(mut welcome)) = decode(&welcome) else { panic!("no welcome") };
        change(&mut welcome);
        let changed = Message::Welcome(welcome).encode();
        let refused = |proof: Vec<u8>| acceptor.on_proof(&proof).is_err();
        assert!(init.on_welcome(&changed).map_or(true, |w| refused(w.proof)), "{what}");
    }
}

#[test]
fn proof_and_session_depend_on_the_welcome() {
    let (a, b) = (speaking(1, 3), speaking(1, 3));
    let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
    let (mut acc, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
    let welcomed = init.on_welcome(&welcome).unwrap();
    // The acceptor's copy of its welcome differs from what the initiator received.
    acc.welcome[12] ^= 1;
    assert!(acc.on_proof(&welcomed.proof).is_err());
    let sealed = acc.session().seal(b"setup", b"what else");
    assert!(welcomed.session.unseal(b"setup", &sealed).is_err());
}

#[test]
fn a_stranger_cannot_write_lines_into_the_log() {
    let (mut a, b) = (speaking(3, 3), speaking(1, 2));
    a.own.name = format!("x\n\u{1b}[31m\u{2028}\u{202e}WARN {}", "y".repeat(5000));
    let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
    let Err(refusal) = Acceptor::on_hello(&b, &hello) else { panic!("they met") };
    let said = refusal.error.to_string();
    let name = format!("x[31mWARN {}", "y".repeat(54));
    let id = a.own.id;
    assert!(said.contains(&format!("3 is spoken by {name}#{id}, 1 to 2 by v2#")), "{said}");
    assert!(said.ends_with("upgrade the older side"), "{said}");
    let Err(heard) = init.on_welcome(&refusal.reply.unwrap()) else { panic!("welcomed") };
    assert_eq!(heard.error, refusal.error, "the initiator shortened the text");
    // Neither can an acceptor with another identity.
    let (c, mut d) = (speaking(1, 1), speaking(1, 1));
    d.own.name = "z\nERROR".into();
    let (init, hello) = Initiator::start(&c, EngineId([9; 16]), vec![]).unwrap();
    let Message::Hello(mut said) = decode(&hello).unwrap() else { panic!("no hello") };
    said.to = d.own.id.0;
    let (_, welcome) = Acceptor::on_hello(&d, &Message::Hello(said).encode()).unwrap();
    let Err(stale) = init.on_welcome(&welcome) else { panic!("welcomed") };
    let said = stale.error.to_string();
    assert!(said.contains("engine zERROR#"), "{said}");
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..400, flip in any::<(usize, u8)>()) {
        let (a, b) = (credentials("a", b"x"), credentials("b", b"x"));
        prop_assert!(Acceptor::on_hello(&b, &bytes).is_err());
        let (init, mut hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        prop_assert!(init.on_welcome(&bytes).is_err());
        if cut < hello.len() {
            prop_assert!(Acceptor::on_hello(&b, &hello[..cut]).is_err());
        }
        let at = flip.0 % hello.len();
        if flip.1 != 0 {
            hello[at] ^= flip.1;
            prop_assert!(Acceptor::on_hello(&b, &hello).is_err());
        }
    }
}
