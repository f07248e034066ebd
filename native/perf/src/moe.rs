//! Exchanges of tokens between experts on simulated NICs: the real protocol, engine and group code;
//! only time and links are made up. And, in real time, what it costs a rank to post what it sends
//! (fabric-lib, Table 9).

use std::{sync::Arc, time::Instant};

use clap::Args;
use fabric_engine::{
    api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, Time, TransferEngine,
};
use fabric_moe::{
    kernels::{Float, Part, PartMut},
    routes::Order,
    AllToAll, AnswerFormat, Shape,
};
use serde::Serialize;

/// Exchanges before those that count: connections are made, and memory is touched.
const WARMUP_EXCHANGES: u32 = 2;

#[derive(Debug, Args)]
pub struct Options {
    #[arg(long, default_value_t = 8)]
    ranks: u32,
    #[arg(long, default_value_t = 128)]
    tokens: u32,
    #[arg(long, default_value_t = 256)]
    experts: u32,
    #[arg(long, default_value_t = 8)]
    topk: u32,
    /// Bytes of a token on its way to an expert.
    #[arg(long, default_value_t = 7392)]
    row_nbytes: u32,
    /// Elements of an answer, in bfloat16.
    #[arg(long, default_value_t = 7168)]
    elements: u32,
    #[arg(long, default_value_t = 32)]
    private_rows: u32,
    /// Of a rank's NICs together, gigabits a second.
    #[arg(long, default_value_t = 400.0)]
    gbps: f64,
    /// One way, nanoseconds; deliveries take up to a quarter more.
    #[arg(long, default_value_t = 2000)]
    latency: u64,
    #[arg(long, default_value_t = 10)]
    exchanges: u32,
}

/// Times in microseconds.
#[derive(Debug, Serialize)]
struct Report {
    dispatch_p50_us: f64,
    dispatch_max_us: f64,
    combine_p50_us: f64,
    combine_max_us: f64,
    /// Bytes over the busiest port, and one way.
    dispatch_floor_us: f64,
    combine_floor_us: f64,
    /// Real time: routes and rows to all peers, handed to the engine and by it to the links.
    post_p50_us: f64,
}

struct Rank {
    all: AllToAll,
    engine: Arc<TransferEngine>,
    indices: Vec<i64>,
    rows: Vec<u8>,
    answered: bool,
    done: Option<u64>,
}

pub fn run(options: &Options) -> Result<(), String> {
    let error_text = |e: fabric_engine::EngineError| e.to_string();
    let back = AnswerFormat { elements: options.elements, float: Float::Bf16 };
    let shape = Shape {
        ranks: options.ranks,
        experts: options.experts,
        topk: options.topk,
        max_tokens: options.tokens,
        row_nbytes: options.row_nbytes,
        back,
        private_rows: options.private_rows,
        shared_rows: Some(4 * options.tokens * options.topk),
    };
    let rate = options.gbps / 8.0;
    let mut net = SimNet::new(SimConfig {
        seed: 1,
        delay: options.latency..options.latency + options.latency / 4 + 1,
        port_rate: Some(rate),
        max_bytes: 1 << 30,
        window: 1 << 12,
        ..SimConfig::default()
    });
    let mut ranks = open_ranks(&mut net, shape).map_err(error_text)?;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let mut floors = [0.0f64; 2];
    for exchange in 0..WARMUP_EXCHANGES + options.exchanges {
        let counts = draw(&mut ranks, &shape, u64::from(exchange));
        let begun = net.now();
        let mut posts = Vec::new();
        let tokens = vec![0u8; (options.tokens * options.row_nbytes) as usize];
        let width = options.row_nbytes as usize;
        for rank in &mut ranks {
            let part = Part { bytes: &tokens, stride: width, width };
            let real = Instant::now();
            rank.all.dispatch_send(&[part], &rank.indices).map_err(error_text)?;
            rank.engine.drive(net.now());
            posts.push(real.elapsed().as_nanos() as f64 / 1e3);
        }
        let dispatched = finish(&mut net, &mut ranks, begun, |rank| {
            let Some(placing) = rank.all.arriving(Order::Packed { multiple: 1 })? else {
                return Ok(false);
            };
            rank.rows.resize(placing.rows as usize * width, 0);
            let out = PartMut { bytes: &mut rank.rows, stride: width, width };
            rank.all.collect(&mut [out])
        })?;
        settle(&mut net, &ranks);
        let begun = compute(&mut net, options.latency);
        let wide = shape.back_nbytes() as usize;
        ranks.iter_mut().for_each(|r| r.answered = false);
        let answers =
            vec![0u8; ranks.iter().map(|r| r.rows.len() / width).max().unwrap_or(0) * wide];
        let combined = finish(&mut net, &mut ranks, begun, |rank| {
            if !rank.answered {
                let part = Part { bytes: &answers, stride: wide, width: wide };
                rank.answered = rank.all.combine_some(part)?;
            }
            if !rank.all.answered() {
                return Ok(false);
            }
            let mut sums = vec![0u8; options.tokens as usize * wide];
            let mut out = PartMut { bytes: &mut sums, stride: wide, width: wide };
            rank.all.combine_recv(None, &mut out, Float::Bf16).map(|_| true)
        })?;
        settle(&mut net, &ranks);
        compute(&mut net, options.latency);
        if exchange >= WARMUP_EXCHANGES {
            times[0].extend(dispatched);
            times[1].extend(combined);
            times[2].extend(posts);
            let busiest = counts as f64;
            let one_way = options.latency as f64;
            let over = |bytes: f64| (busiest * bytes / rate + one_way) / 1e3;
            floors[0] = floors[0].max(over(f64::from(options.row_nbytes)));
            floors[1] = floors[1].max(over(shape.back_nbytes() as f64));
        }
    }
    for list in &mut times {
        list.sort_by(f64::total_cmp);
    }
    let p50 = |list: &[f64]| list[list.len() / 2];
    let max = |list: &[f64]| list[list.len() - 1];
    let report = Report {
        dispatch_p50_us: p50(&times[0]),
        dispatch_max_us: max(&times[0]),
        combine_p50_us: p50(&times[1]),
        combine_max_us: max(&times[1]),
        dispatch_floor_us: floors[0],
        combine_floor_us: floors[1],
        post_p50_us: p50(&times[2]),
    };
    println!("{}", serde_json::to_string(&report).map_err(|e| e.to_string())?);
    Ok(())
}

fn open_ranks(net: &mut SimNet, shape: Shape) -> fabric_engine::Result<Vec<Rank>> {
    let mut ranks = Vec::new();
    for rank in 0..shape.ranks {
        let config = EngineConfig { name: format!("rank {rank}"), ..EngineConfig::default() };
        let engine = net.engine(config)?;
        let all = AllToAll::new(Arc::clone(&engine), shape, rank)?;
        ranks.push(Rank {
            all,
            engine,
            indices: Vec::new(),
            rows: Vec::new(),
            answered: false,
            done: None,
        });
    }
    let descriptors: Vec<Vec<u8>> =
        ranks.iter().map(|r| r.all.descriptor(None)).collect::<Result<_, _>>()?;
    for (i, rank) in ranks.iter().enumerate() {
        for (_, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
            rank.all.admit(descriptor)?;
        }
    }
    Ok(ranks)
}

/// Draws experts for all tokens; returns the rows over the busiest port.
fn draw(ranks: &mut [Rank], shape: &Shape, seed: u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |below: u32| {
        // xorshift64: as random as routes have to be.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % below
    };
    let (mut out, mut into) = (vec![0u64; ranks.len()], vec![0u64; ranks.len()]);
    for (i, rank) in ranks.iter_mut().enumerate() {
        rank.indices.clear();
        for _ in 0..shape.max_tokens {
            let mut picked: Vec<i64> = Vec::new();
            while picked.len() < shape.topk as usize {
                let expert = i64::from(next(shape.experts));
                if !picked.contains(&expert) {
                    picked.push(expert);
                    let to = shape.rank_of(expert as u32) as usize;
                    if to != i {
                        out[i] += 1;
                        into[to] += 1;
                    }
                }
            }
            rank.indices.extend(picked);
        }
    }
    out.into_iter().chain(into).max().unwrap_or(0)
}

/// Lets time pass until `step` is true of every rank; microseconds that each took.
fn finish(
    net: &mut SimNet,
    ranks: &mut [Rank],
    begun: Time,
    mut step: impl FnMut(&mut Rank) -> fabric_engine::Result<bool>,
) -> Result<Vec<f64>, String> {
    ranks.iter_mut().for_each(|r| r.done = None);
    loop {
        let mut open = false;
        for rank in ranks.iter_mut() {
            if rank.done.is_none() && step(rank).map_err(|e| e.to_string())? {
                rank.done = Some(net.now().since(begun).as_nanos() as u64);
            }
            open |= rank.done.is_none();
        }
        if !open {
            return Ok(ranks.iter().filter_map(|r| r.done).map(|ns| ns as f64 / 1e3).collect());
        }
        if !net.step() {
            return Err("nothing happens any more, and an exchange isn't over".into());
        }
    }
}

/// Lets everything end that is under way.
fn settle(net: &mut SimNet, ranks: &[Rank]) {
    while !ranks.iter().all(|r| r.all.may_dispatch()) && net.step() {}
}

/// Experts compute for a while; when they are ready.
fn compute(net: &mut SimNet, latency: u64) -> Time {
    let end = Time(net.now().0 + 10 * latency);
    while net.step_until(end) {}
    net.advance(end);
    net.now()
}
