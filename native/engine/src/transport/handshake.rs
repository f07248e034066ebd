//! How two engines become sure of each other before anything else is said: protocol version, whose
//! life this is (MR-2), and that both know the token. Used by every software transport.
//!
//! ```text
//! initiator -> Hello    { versions, me, whom I want, nonce, extra }
//! acceptor  -> Welcome  { version, me, nonce, mac }            or Refusal
//! initiator -> Proof    { mac }
//! acceptor  -> Accepted                                        or Refusal
//! ```
//! What these messages say stays as it is in all versions, but for the endpoints of an [`EngineAddress`]: see the known
//! gaps of `docs/design/wire.md`.
//!
//! A mac is HMAC-SHA256, keyed with the token, over the role, the hello as it came, and all of the welcome but its
//! mac: nobody on the way can change a version, a name or an endpoint.

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{
    api::{EngineAddress, EngineId, Envelope, Versions, WIRE},
    domain::{DomainError, PeerIdentity},
};

const ENVELOPE: Envelope = Envelope {
    magic: *b"FRhs",
    what: "a handshake message",
    limit: MAX_MESSAGE,
    reads: Versions::only(1),
    writes: 1,
};

/// Longest handshake message, bytes.
pub(crate) const MAX_MESSAGE: usize = 16 << 10;

type Nonce = [u8; 32];
type Digest = [u8; 32];

#[derive(Serialize, Deserialize)]
struct Hello {
    oldest: u16,
    newest: u16,
    from: EngineAddress,
    to: EngineId,
    nonce: Nonce,
    extra: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Welcome {
    version: u16,
    from: EngineAddress,
    nonce: Nonce,
    mac: Digest,
}

impl Welcome {
    /// What its mac is over.
    fn unsigned(&self) -> Vec<u8> {
        // Serialising our own plain values into memory has no way to fail.
        postcard::to_allocvec(&(self.version, &self.from, self.nonce)).unwrap_or_default()
    }
}

#[derive(Serialize, Deserialize)]
struct Refusal {
    stale: bool,
    reason: String,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Hello(Hello),
    Welcome(Welcome),
    Proof(Digest),
    Accepted,
    Refusal(Refusal),
}

/// What a side brings to a handshake.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub own: EngineAddress,
    pub token: Vec<u8>,
    pub versions: Versions,
}

impl Credentials {
    pub fn new(own: EngineAddress, token: Vec<u8>) -> Self {
        Self { own, token, versions: WIRE }
    }
}

/// A handshake that failed: what to tell the other side, if anything, and what to report here.
#[derive(Debug)]
pub(crate) struct Failure {
    pub reply: Option<Vec<u8>>,
    pub error: DomainError,
}

impl Failure {
    fn silent(error: DomainError) -> Self {
        Self { reply: None, error }
    }

    /// An error of ours that the other side should hear of: it has proven itself.
    pub fn told(error: DomainError) -> Self {
        Self { error: error.clone(), ..Self::refuse(false, error.to_string()) }
    }

    fn refuse(stale: bool, reason: String) -> Self {
        let reply = ENVELOPE.encode(&Message::Refusal(Refusal { stale, reason: reason.clone() }));
        Self { reply: Some(reply), error: DomainError::Handshake(reason) }
    }
}

fn decode(bytes: &[u8]) -> Result<Message, Failure> {
    ENVELOPE.decode(bytes).map_err(|e| Failure::silent(DomainError::Handshake(e.to_string())))
}

fn unexpected(expected: &str) -> Failure {
    Failure::refuse(false, format!("the handshake is out of step: expected {expected}"))
}

/// What a stranger says, fit for a line of a log: short, and without what ends lines or turns them around.
fn printable(said: &str, longest: usize) -> String {
    let plain = |c: &char| {
        !c.is_control() && !matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    said.chars().filter(plain).take(longest).collect()
}

/// An engine's label, before it has proven anything.
fn claimed(address: &EngineAddress) -> String {
    format!("{}#{}", printable(&address.name, 64), address.id)
}

fn refused(r: Refusal) -> Failure {
    let reason = printable(&r.reason, 300);
    Failure::silent(match r.stale {
        true => DomainError::Stale(reason),
        false => DomainError::Handshake(reason),
    })
}

/// Notes a connection that ended in its handshake. Peers that just go away are no news.
pub(crate) fn mourn(peer: &str, cause: &DomainError) {
    match cause {
        DomainError::LinkDown(_) | DomainError::Gone(_) => {
            tracing::info!(%peer, error = %cause, "a connection came to nothing");
        }
        _ => tracing::warn!(%peer, error = %cause, "a connection came to nothing"),
    }
}

fn nonce() -> Result<Nonce, Failure> {
    let mut n = [0; 32];
    getrandom::fill(&mut n)
        .map_err(|e| Failure::silent(DomainError::Unavailable(format!("getrandom: {e}"))))?;
    Ok(n)
}

fn mac(key: &[u8], role: &[u8], said: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key)
        .unwrap_or_else(|_| unreachable!("hmac takes any key"));
    mac.update(role);
    said.iter().for_each(|part| mac.update(part));
    mac
}

/// What both sides of one handshake know and nobody else: a key for what else they tell each other
/// on a wire that strangers can write to.
#[derive(Clone)]
pub(crate) struct Session(Digest);

impl Session {
    /// The bytes with a mac behind them. `role` tells the two directions apart.
    pub fn seal(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let sum = mac(&self.0, role, &[bytes]);
        [bytes, &sum.finalize().into_bytes()].concat()
    }

    /// The bytes before the mac, if it is right.
    pub fn unseal<'a>(&self, role: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], DomainError> {
        let cut = sealed.len().checked_sub(size_of::<Digest>());
        let (bytes, sum) = cut.map(|n| sealed.split_at(n)).unwrap_or_default();
        mac(&self.0, role, &[bytes])
            .verify_slice(sum)
            .map(|()| bytes)
            .map_err(|_| DomainError::Handshake("a message was changed on its way".into()))
    }
}

const WRONG_TOKEN: &str = "the tokens differ: give both engines the same token";

pub(crate) struct Initiator {
    credentials: Credentials,
    to: EngineId,
    hello: Vec<u8>,
}

/// The acceptor's word, checked: send `proof`, then await `Accepted`.
pub(crate) struct Welcomed {
    pub proof: Vec<u8>,
    pub peer: PeerIdentity,
    pub session: Session,
}

impl Initiator {
    /// Returns the first message to send.
    pub fn start(
        credentials: &Credentials,
        to: EngineId,
        extra: Vec<u8>,
    ) -> Result<(Self, Vec<u8>), DomainError> {
        let nonce = nonce().map_err(|f| f.error)?;
        let Versions { oldest, newest } = credentials.versions;
        let from = credentials.own.clone();
        let hello = Hello { oldest, newest, from, to, nonce, extra };
        let hello = ENVELOPE.encode(&Message::Hello(hello));
        let this = Self { credentials: credentials.clone(), to, hello: hello.clone() };
        Ok((this, hello))
    }

    pub fn on_welcome(&self, bytes: &[u8]) -> Result<Welcomed, Failure> {
        let welcome = match decode(bytes)? {
            Message::Welcome(w) => w,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a welcome")),
        };
        let ours = self.credentials.versions;
        if !ours.contains(welcome.version) {
            let reason = format!(
                "protocol version {} was chosen, {ours} was offered; upgrade the older side",
                welcome.version
            );
            return Err(Failure::refuse(false, reason));
        }
        if welcome.from.id != self.to {
            let cause = format!("engine {} answers there now", claimed(&welcome.from));
            return Err(Failure::silent(DomainError::Stale(cause)));
        }
        let token = &self.credentials.token;
        let unsigned = welcome.unsigned();
        let sum = |role: &[u8]| mac(token, role, &[&self.hello, &unsigned]);
        if sum(b"acceptor").verify_slice(&welcome.mac).is_err() {
            return Err(Failure::refuse(false, WRONG_TOKEN.into()));
        }
        let proof = sum(b"initiator").finalize().into_bytes().into();
        let session = Session(sum(b"session").finalize().into_bytes().into());
        Ok(Welcomed {
            proof: ENVELOPE.encode(&Message::Proof(proof)),
            peer: PeerIdentity { address: welcome.from },
            session,
        })
    }

    pub fn on_accepted(&self, bytes: &[u8]) -> Result<(), Failure> {
        match decode(bytes)? {
            Message::Accepted => Ok(()),
            Message::Refusal(r) => Err(refused(r)),
            _ => Err(unexpected("an acceptance")),
        }
    }
}

/// Waits for the proof of whoever said hello.
pub(crate) struct Acceptor {
    token: Vec<u8>,
    hello: Vec<u8>,
    /// All of ours but its mac.
    welcome: Vec<u8>,
    pub peer: PeerIdentity,
    pub extra: Vec<u8>,
}

impl Acceptor {
    /// Returns what to answer.
    pub fn on_hello(credentials: &Credentials, bytes: &[u8]) -> Result<(Self, Vec<u8>), Failure> {
        let Message::Hello(hello) = decode(bytes)? else { return Err(unexpected("a hello")) };
        let (ours, theirs) =
            (credentials.versions, Versions { oldest: hello.oldest, newest: hello.newest });
        let Some(version) = ours.common(theirs) else {
            // Both sides read it: here and there would mean something else to each.
            let (name, from) = (claimed(&credentials.own), claimed(&hello.from));
            return Err(Failure::refuse(
                false,
                format!(
                    "no common protocol version: {theirs} is spoken by {from}, {ours} by {name}; \
                     upgrade the older side"
                ),
            ));
        };
        if hello.to != credentials.own.id {
            let now = credentials.own.label();
            return Err(Failure::refuse(
                true,
                format!("engine {} is gone, {now} lives at its address now", hello.to),
            ));
        }
        let (from, nonce) = (credentials.own.clone(), nonce()?);
        let mut welcome = Welcome { version, from, nonce, mac: [0; 32] };
        let this = Self {
            token: credentials.token.clone(),
            hello: bytes.to_vec(),
            welcome: welcome.unsigned(),
            peer: PeerIdentity { address: hello.from },
            extra: hello.extra,
        };
        welcome.mac = this.sum(b"acceptor").finalize().into_bytes().into();
        Ok((this, ENVELOPE.encode(&Message::Welcome(welcome))))
    }

    fn sum(&self, role: &[u8]) -> Hmac<Sha256> {
        mac(&self.token, role, &[&self.hello, &self.welcome])
    }

    /// Worth something once the proof was right.
    pub fn session(&self) -> Session {
        Session(self.sum(b"session").finalize().into_bytes().into())
    }

    /// Returns the acceptance to send.
    pub fn on_proof(&self, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof = match decode(bytes)? {
            Message::Proof(p) => p,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a proof")),
        };
        match self.sum(b"initiator").verify_slice(&proof) {
            Ok(()) => Ok(ENVELOPE.encode(&Message::Accepted)),
            Err(_) => Err(Failure::refuse(false, WRONG_TOKEN.into())),
        }
    }
}

/// One message of each kind, always the same.
#[cfg(all(test, not(loom)))]
pub(crate) fn samples(a: Credentials, b: Credentials) -> [Vec<u8>; 5] {
    let (to, nonce, mac) = (b.own.id, [3; 32], [5; 32]);
    let hello = Hello { oldest: 1, newest: 1, from: a.own, to, nonce, extra: vec![6] };
    let refusal = Refusal { stale: true, reason: "it is gone".into() };
    [
        Message::Hello(hello),
        Message::Welcome(Welcome { version: 1, from: b.own, nonce, mac }),
        Message::Proof(mac),
        Message::Accepted,
        Message::Refusal(refusal),
    ]
    .map(|m| ENVELOPE.encode(&m))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn credentials(name: &str, token: &[u8]) -> Credentials {
        let id = EngineId::random().unwrap();
        let own = EngineAddress { id, name: name.into(), endpoints: Vec::new() };
        Credentials::new(own, token.into())
    }

    fn shake(a: &Credentials, b: &Credentials, to: EngineId) -> Result<(), DomainError> {
        let (init, hello) = Initiator::start(a, to, vec![1]).unwrap();
        let (acc, welcome) = match Acceptor::on_hello(b, &hello) {
            Ok(x) => x,
            Err(f) => return init.on_welcome(&f.reply.unwrap()).map(drop).map_err(|f| f.error),
        };
        assert_eq!(acc.extra, [1]);
        let welcomed = init.on_welcome(&welcome).map_err(|f| f.error)?;
        let accepted = acc.on_proof(&welcomed.proof).map_err(|f| f.error)?;
        init.on_accepted(&accepted).map_err(|f| f.error)?;
        assert_eq!(acc.peer.id(), a.own.id);
        assert_eq!(welcomed.peer.id(), b.own.id);
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
        assert_eq!(shake(&a, &b, b.own.id), Ok(()));
        let c = credentials("c", b"y");
        assert_eq!(shake(&a, &c, c.own.id), Err(DomainError::Handshake(WRONG_TOKEN.into())));
    }

    #[test]
    fn an_acceptor_that_skips_the_token_is_found_out_and_so_is_an_initiator() {
        let (a, b, c) = (credentials("a", b"x"), credentials("b", b"x"), credentials("b", b"y"));
        let (_, hello) = Initiator::start(&c, b.own.id, vec![]).unwrap();
        let (acc, _) = Acceptor::on_hello(&b, &hello).unwrap();
        assert!(acc.on_proof(&ENVELOPE.encode(&Message::Proof([7; 32]))).is_err());
        let (init, hello) = Initiator::start(&a, c.own.id, vec![]).unwrap();
        let (_, welcome) = Acceptor::on_hello(&c, &hello).unwrap();
        assert!(init.on_welcome(&welcome).is_err());
    }

    #[test]
    fn mr_2_a_restart_under_the_same_name_is_stale() {
        let (a, b, again) = (credentials("a", b""), credentials("b", b""), credentials("b", b""));
        assert!(matches!(shake(&a, &again, b.own.id), Err(DomainError::Stale(_))));
    }

    /// What a build that speaks `oldest` to `newest` brings.
    fn speaking(oldest: u16, newest: u16) -> Credentials {
        let versions = Versions { oldest, newest };
        Credentials { versions, ..credentials(&format!("v{newest}"), b"x") }
    }

    #[test]
    fn builds_one_version_apart_meet_whoever_begins() {
        for ((a, b), met) in [
            (((1, 2), (2, 3)), 2),
            (((2, 3), (1, 2)), 2),
            (((1, 1), (1, 2)), 1),
            (((1, 2), (1, 1)), 1),
        ] {
            let (a, b) = (speaking(a.0, a.1), speaking(b.0, b.1));
            assert_eq!(shake(&a, &b, b.own.id), Ok(()));
            let (_, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
            let (_, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
            let Ok(Message::Welcome(welcome)) = decode(&welcome) else { panic!("no welcome") };
            assert_eq!(welcome.version, met);
        }
    }

    #[test]
    fn builds_further_apart_refuse_each_other_with_the_same_words_on_both_sides() {
        for (a, b) in [((1, 1), (3, 3)), ((3, 4), (1, 2))] {
            let (a, b) = (speaking(a.0, a.1), speaking(b.0, b.1));
            let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
            let Err(refusal) = Acceptor::on_hello(&b, &hello) else { panic!("they met") };
            let Err(heard) = init.on_welcome(&refusal.reply.unwrap()) else { panic!("welcomed") };
            assert_eq!(refusal.error, heard.error);
            let said = heard.error.to_string();
            for (who, versions) in [(&a, a.versions), (&b, b.versions)] {
                assert!(said.contains(&versions.to_string()), "{said}");
                assert!(said.contains(&who.own.label()), "{said}");
            }
            assert!(said.contains("upgrade the older side"), "{said}");
        }
    }

    #[test]
    fn a_version_that_was_not_offered_is_refused() {
        let (a, b) = (speaking(1, 2), speaking(1, 3));
        let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        let from = b.own.clone();
        let mut welcome = Welcome { version: 3, from, nonce: [3; 32], mac: [0; 32] };
        let mac = mac(&b.token, b"acceptor", &[&hello, &welcome.unsigned()]);
        welcome.mac = mac.finalize().into_bytes().into();
        let Err(failure) = init.on_welcome(&ENVELOPE.encode(&Message::Welcome(welcome))) else {
            panic!("it was taken")
        };
        assert!(failure.reply.is_some());
        assert!(failure.error.to_string().contains("version 3 was chosen, 1 to 2 was offered"));
    }

    #[test]
    fn a_welcome_that_was_changed_on_its_way_is_refused() {
        use crate::api::{Endpoint, TransportKind};
        let (a, mut b) = (speaking(1, 3), speaking(1, 3));
        b.own.endpoints = vec![Endpoint { transport: TransportKind::Tcp, data: vec![1, 2, 3] }];
        type Change = (&'static str, fn(&mut Welcome));
        let changes: [Change; 5] = [
            ("version", |w| w.version ^= 1),
            ("name", |w| w.from.name.replace_range(..1, "w")),
            ("an endpoint", |w| w.from.endpoints[0].data[1] ^= 1),
            ("transport", |w| w.from.endpoints[0].transport = TransportKind::Shm),
            ("nonce", |w| w.nonce[0] ^= 1),
        ];
        for (what, change) in changes {
            let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
            let (_, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
            assert!(init.on_welcome(&welcome).is_ok());
            let Ok(Message::Welcome(mut welcome)) = decode(&welcome) else { panic!("no welcome") };
            change(&mut welcome);
            let changed = ENVELOPE.encode(&Message::Welcome(welcome));
            assert!(init.on_welcome(&changed).is_err(), "{what}");
        }
    }

    #[test]
    fn proof_and_session_are_of_one_welcome() {
        let (a, b) = (speaking(1, 3), speaking(1, 3));
        let (init, hello) = Initiator::start(&a, b.own.id, vec![]).unwrap();
        let (mut acc, welcome) = Acceptor::on_hello(&b, &hello).unwrap();
        let welcomed = init.on_welcome(&welcome).unwrap();
        // The acceptor chose a version, and thinks that it said another.
        acc.welcome[0] ^= 1;
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
        assert_eq!(heard.error, refusal.error, "it was cut on the other side");
        // Nor can whoever answers in another's place.
        let (c, mut d) = (speaking(1, 1), speaking(1, 1));
        d.own.name = "z\nERROR".into();
        let (init, hello) = Initiator::start(&c, EngineId([9; 16]), vec![]).unwrap();
        let Message::Hello(mut said) = decode(&hello).unwrap() else { panic!("no hello") };
        said.to = d.own.id;
        let (_, welcome) = Acceptor::on_hello(&d, &ENVELOPE.encode(&Message::Hello(said))).unwrap();
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
}
