//! Ranks in processes of their own. A child is this test program, run with [`child`] only.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::{atomic::Ordering::Acquire, Arc},
};

use fabric_engine::api::TransportKind;
use fabric_proxy::{Event, Proxy, RankDescriptor};

use crate::{
    device::{Device, Plan},
    threads::{config, device, open, until},
};

const RANK: &str = "FABRIC_PROXY_TEST_RANK";
const TRANSPORT: &str = "FABRIC_PROXY_TEST_TRANSPORT";
/// Prefix of a child's output, among that of the test harness.
const MARK: &str = "rank says ";

/// Long enough to kill the third rank in the middle.
const PLAN: Plan = Plan { ranks: 3, channels: 2, rounds: 400, ordered: true, seed: 7 };

fn rank(rank: usize, transport: TransportKind) -> Proxy {
    let config = fabric_proxy::Config { rank, ..config(&PLAN) };
    open(
        transport,
        &config,
        PLAN.memory(),
        Arc::new(|event| match event {
            Event::Joined { .. } | Event::Lost { rank: 2, .. } | Event::Gone { rank: 2, .. } => {}
            other => panic!("{other:?}"),
        }),
    )
}

fn to_line(descriptor: &RankDescriptor) -> String {
    descriptor.to_bytes().iter().map(|b| format!("{b:02x}")).collect()
}

fn of_line(line: &str) -> RankDescriptor {
    let bytes: Vec<u8> = (0..line.len() / 2)
        .map(|i| u8::from_str_radix(&line[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    RankDescriptor::from_bytes(&bytes).unwrap()
}

/// Sends to all until the third rank is lost and all other tokens have arrived.
fn take_part(proxy: &Proxy) {
    let mut device: Device = device(proxy, PLAN, &[0, 1, 2], true);
    until("sending past a dead process", || {
        device.step();
        device.has_sent_all() && device.has_all_of(&[0, 1]) && !proxy.alive().is_alive(2)
    });
}

#[test]
#[ignore = "a child of the other tests"]
fn child() {
    let Ok(number) = env::var(RANK) else { return };
    let transport = env::var(TRANSPORT).unwrap().parse().unwrap();
    let proxy = rank(number.parse().unwrap(), transport);
    println!("\n{MARK}{}", to_line(proxy.descriptor()));
    let mut lines = std::io::stdin().lines();
    for _ in 0..PLAN.ranks - 1 {
        proxy.join(&of_line(lines.next().unwrap().unwrap().trim())).unwrap();
    }
    println!("\n{MARK}joined");
    take_part(&proxy);
    println!("\n{MARK}done");
    // Runs until the parent ends it.
    let _ = lines.next();
}

struct ChildProcess {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl ChildProcess {
    fn spawn(number: usize, transport: TransportKind) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["processes::child", "--exact", "--ignored", "--nocapture"])
            .env(RANK, number.to_string())
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

fn a_process_is_killed(transport: TransportKind) {
    let own = rank(0, transport);
    let mut children: Vec<_> = [1, 2].map(|number| ChildProcess::spawn(number, transport)).into();
    let lines: Vec<_> = children.iter_mut().map(ChildProcess::read_reply).collect();
    for (i, child) in children.iter_mut().enumerate() {
        child.send(&to_line(own.descriptor()));
        child.send(&lines[1 - i]);
        own.join(&of_line(&lines[i])).unwrap();
    }
    assert!(children.iter_mut().all(|child| child.read_reply() == "joined"));
    // In the middle: its data begins to arrive, and it waits for data of this rank.
    let of_third = || PLAN.of(2).any(|slot| own.words()[slot].load(Acquire) > 0);
    until("the first of it", of_third);
    children[1].child.kill().unwrap();
    take_part(&own);
    assert_eq!(children[0].read_reply(), "done");
}

#[test]
fn a_killed_process_does_not_stop_the_others_over_shm() {
    a_process_is_killed(TransportKind::Shm);
}

#[test]
fn a_killed_process_does_not_stop_the_others_over_tcp() {
    a_process_is_killed(TransportKind::Tcp);
}
