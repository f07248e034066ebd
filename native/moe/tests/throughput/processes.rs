//! Ranks in processes of their own, one of which is killed. A child is this test program, told to run [`child`] only.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::Duration,
};

use fabric_engine::{api::TransportKind, EngineError};
use fabric_moe::throughput::Spec;

use crate::{
    grouped::spec,
    nodes::{batch, exchange, open},
};

const RANK: &str = "FABRIC_MOE_TEST_RANK";
const TRANSPORT: &str = "FABRIC_MOE_TEST_TRANSPORT";
/// What a child says begins so, for the test harness says other things.
const MARK: &str = "rank says ";
/// Exchanges that all take part in; the next one ends with a death.
const TURNS: usize = 4;

fn shape() -> Spec {
    spec(2, 2, 2, 4, 60)
}

fn to_line(card: &[u8]) -> String {
    card.iter().map(|b| format!("{b:02x}")).collect()
}

fn of_line(line: &str) -> Vec<u8> {
    (0..line.len() / 2).map(|i| u8::from_str_radix(&line[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// Takes part until somebody is gone; what the last exchange says.
fn take_part(
    rank: u32,
    transport: TransportKind,
    lines: &mut dyn Iterator<Item = String>,
) -> EngineError {
    let spec = shape();
    let all = open(spec, rank, transport, Duration::from_secs(30));
    println!("\n{MARK}{}", to_line(&all.card()));
    for _ in 1..spec.shape.ranks {
        all.admit(&of_line(lines.next().unwrap().trim())).unwrap();
    }
    for turn in 0..TURNS {
        let batch = batch(&spec, rank, turn);
        assert_eq!(exchange(&all, rank, &batch, turn).unwrap(), batch.sums());
    }
    println!("\n{MARK}ready");
    let _ = lines.next();
    exchange(&all, rank, &batch(&spec, rank, 5), 5).unwrap_err()
}

#[test]
#[ignore = "a child of the other tests"]
fn child() {
    let Ok(number) = env::var(RANK) else { return };
    let transport = env::var(TRANSPORT).unwrap().parse().unwrap();
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let error = take_part(number.parse().unwrap(), transport, &mut lines);
    println!("\n{MARK}{error}");
}

struct Far {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Far {
    fn spawn(number: u32, transport: TransportKind) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["processes::child", "--exact", "--ignored", "--nocapture"])
            .env(RANK, number.to_string())
            .env(TRANSPORT, transport.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        Self { child, says }
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.says.read_line(&mut line).unwrap() > 0, "the child ended early");
            if let Some(said) = line.trim().strip_prefix(MARK) {
                return said.into();
            }
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn a_killed_process_is_named(transport: TransportKind) {
    let mut far: Vec<Far> = (0..shape().shape.ranks).map(|r| Far::spawn(r, transport)).collect();
    let cards: Vec<String> = far.iter_mut().map(Far::hear).collect();
    for (i, one) in far.iter_mut().enumerate() {
        for (_, card) in cards.iter().enumerate().filter(|(j, _)| *j != i) {
            one.tell(card);
        }
    }
    assert!(far.iter_mut().all(|one| one.hear() == "ready"));
    let mut killed = far.remove(2);
    killed.child.kill().unwrap();
    far.iter_mut().for_each(|one| one.tell("go on"));
    for one in &mut far {
        let said = one.hear();
        assert!(said.contains("peer rank 2 was lost"), "{said}");
    }
}

#[test]
fn rs_4_a_killed_process_is_named_by_all_others_over_shm() {
    a_killed_process_is_named(TransportKind::Shm);
}

#[test]
fn rs_4_a_killed_process_is_named_by_all_others_over_tcp() {
    a_killed_process_is_named(TransportKind::Tcp);
}
