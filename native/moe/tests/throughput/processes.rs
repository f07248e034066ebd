//! Ranks in processes of their own, one of which is killed and joins again. A child is this test
//! program, run with [`child`] only and then given commands.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::Duration,
};

use fabric_engine::api::{EngineConfig, TransportKind};
use fabric_moe::throughput::{Member, Spec, Throughput};

use crate::{
    grouped::spec,
    nodes::{batch, exchange},
};

const RANK: &str = "FABRIC_MOE_TEST_RANK";
const INCARNATION: &str = "FABRIC_MOE_TEST_LIFE";
const TRANSPORT: &str = "FABRIC_MOE_TEST_TRANSPORT";
/// Prefix of a child's output, among that of the test harness.
const MARK: &str = "rank says ";

fn shape() -> Spec {
    spec(2, 2, 2, 4, 60)
}

fn to_line(descriptor: &[u8]) -> String {
    descriptor.iter().map(|b| format!("{b:02x}")).collect()
}

fn of_line(line: &str) -> Vec<u8> {
    (0..line.len() / 2).map(|i| u8::from_str_radix(&line[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// Executes commands, one a line, and prints each result.
fn follow(all: &Throughput, rank: u32, line: &str) -> String {
    let spec = all.spec();
    match line.split_once(' ').unwrap_or((line, "")) {
        ("descriptor", _) => to_line(&all.descriptor()),
        ("admit", descriptor) => match all.admit(&of_line(descriptor)) {
            Ok(_) => "admitted".into(),
            Err(error) => error.to_string(),
        },
        ("exchange", turn) => {
            let turn = turn.parse().unwrap();
            let batch = batch(&spec, rank, turn);
            match exchange(all, rank, &batch, turn) {
                Ok(sums) if sums == batch.sums_of(&all.present()) => {
                    format!("right for {:?}", all.present())
                }
                Ok(_) => "wrong sums".into(),
                Err(error) => error.to_string(),
            }
        }
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "a child of the other tests"]
fn child() {
    let Ok(number) = env::var(RANK) else { return };
    let of = |name: &str| env::var(name).unwrap();
    let member =
        Member { rank: number.parse().unwrap(), incarnation: of(INCARNATION).parse().unwrap() };
    let transports = vec![of(TRANSPORT).parse().unwrap()];
    let name = format!("rank-{number}");
    let config = EngineConfig { name, transports, ..EngineConfig::default() };
    let all = Throughput::open(&config, shape(), member, Duration::from_secs(30)).unwrap();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        println!("\n{MARK}{}", follow(&all, member.rank, line.trim()));
    }
}

struct ChildProcess {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl ChildProcess {
    fn spawn(number: u32, incarnation: u32, transport: TransportKind) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["processes::child", "--exact", "--ignored", "--nocapture"])
            .env(RANK, number.to_string())
            .env(INCARNATION, incarnation.to_string())
            .env(TRANSPORT, transport.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    fn read_reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the child ended early");
            if let Some(said) = line.trim().strip_prefix(MARK) {
                return said.into();
            }
        }
    }

    fn request(&mut self, line: &str) -> String {
        self.send(line);
        self.read_reply()
    }

    fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a command to all at once, because they wait for each other; returns their replies.
fn all_do(children: &mut [ChildProcess], what: &str) -> Vec<String> {
    children.iter_mut().for_each(|one| one.send(what));
    children.iter_mut().map(ChildProcess::read_reply).collect()
}

/// Has all of one group admit all of another.
fn admit_all(some: &mut [ChildProcess], others: &mut [ChildProcess]) {
    let descriptors: Vec<String> = others.iter_mut().map(|one| one.request("descriptor")).collect();
    for one in some {
        for descriptor in &descriptors {
            assert_eq!(one.request(&format!("admit {descriptor}")), "admitted");
        }
    }
}

fn a_killed_process_is_named_left_out_and_comes_again(transport: TransportKind) {
    const VICTIM: usize = 2;
    let mut children: Vec<ChildProcess> =
        (0..shape().shape.ranks).map(|r| ChildProcess::spawn(r, 0, transport)).collect();
    let descriptors: Vec<String> =
        children.iter_mut().map(|one| one.request("descriptor")).collect();
    for (i, one) in children.iter_mut().enumerate() {
        for (_, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
            assert_eq!(one.request(&format!("admit {descriptor}")), "admitted");
        }
    }
    let all_here = vec!["right for [true, true, true, true]"; 4];
    for turn in 0..3 {
        assert_eq!(all_do(&mut children, &format!("exchange {turn}")), all_here);
    }
    let mut killed = children.remove(VICTIM);
    killed.child.kill().unwrap();
    for said in all_do(&mut children, "exchange 5") {
        assert!(said.contains("peer rank 2 was lost"), "{said}");
    }
    for turn in 6..8 {
        let said = all_do(&mut children, &format!("exchange {turn}"));
        assert_eq!(said, vec!["right for [true, true, false, true]"; 3]);
    }
    let mut anew = [ChildProcess::spawn(VICTIM as u32, 1, transport)];
    admit_all(&mut anew, &mut children);
    admit_all(&mut children, &mut anew);
    let [anew] = anew;
    children.insert(VICTIM, anew);
    for turn in 8..10 {
        assert_eq!(all_do(&mut children, &format!("exchange {turn}")), all_here);
    }
}

#[test]
fn rs_4_a_killed_process_is_named_left_out_and_comes_again_over_shm() {
    a_killed_process_is_named_left_out_and_comes_again(TransportKind::Shm);
}

#[test]
fn rs_4_a_killed_process_is_named_left_out_and_comes_again_over_tcp() {
    a_killed_process_is_named_left_out_and_comes_again(TransportKind::Tcp);
}
