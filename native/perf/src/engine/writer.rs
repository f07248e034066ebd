//! The writing process: starts the target, writes to it, and puts both sides' times together.

use std::{
    collections::VecDeque,
    io::BufReader,
    ops::Range,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use fabric_engine::{
    api::{Imm, PageIndices, Pages},
    Counter, Handle, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};
use serde::de::DeserializeOwned;

use super::{
    target::{spin_until, EndpointDescriptor, TargetCommand, LONG},
    walk,
    walk::Walk,
    Kind, Notice, Options, Reply, Request,
};
use crate::lines::{read_line, text, write_line, TextResult};

/// The counter that the target answers on.
const ANSWERS: u32 = 9;

/// The target's process, ended with this value.
struct Target {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Target {
    fn start(options: &Options) -> TextResult<Self> {
        let exe = std::env::current_exe().map_err(text)?;
        let mut command = Command::new(exe);
        command.args(["engine", "target", "--transport", &options.transport]);
        command.args(["--copy-threads", &options.copy_threads.to_string()]);
        command.args(["--tcp-streams", &options.tcp_streams.to_string()]);
        command.args(["--region", &options.region.to_string()]);
        command.args(["--spin-us", &options.spin_us.to_string()]);
        if !options.target_nics.is_empty() {
            command.args(["--nics", &options.target_nics.join(",")]);
        }
        if let Some(provider) = &options.provider {
            command.args(["--provider", provider]);
        }
        if options.foreign {
            command.arg("--foreign");
        }
        if options.no_heal {
            command.arg("--no-heal");
        }
        if options.no_records {
            command.arg("--no-records");
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(text)?;
        let to = child.stdin.take().ok_or("no pipe to the target")?;
        let from = BufReader::new(child.stdout.take().ok_or("no pipe from the target")?);
        Ok(Self { child, to, from })
    }

    fn order<T: DeserializeOwned>(&mut self, order: &TargetCommand) -> TextResult<T> {
        write_line(&mut self.to, order)?;
        read_line(&mut self.from)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Writer {
    target: Target,
    engine: TransferEngine,
    src: Region,
    dst: RemoteRegion,
    imm: Imm,
    answers: Counter,
    step: u64,
    /// Built once: the list of a walk's places is long.
    places: Option<(Walk, Vec<u32>)>,
    /// Times of the writes of a window, if a request asked for them.
    trace: Mutex<Vec<(u64, u64)>>,
    _inbox: Region,
}

impl Writer {
    pub fn start(options: &Options) -> TextResult<Self> {
        let mut target = Target::start(options)?;
        let engine = super::open(options, "writer")?;
        let src = super::region(options, &engine)?;
        walk::fill(&src)?;
        let (dst, imm) = read_line::<EndpointDescriptor>(&mut target.from)?.read(&engine)?;
        let inbox = engine.alloc(4096).map_err(text)?;
        let answers = engine.plain_counter(Imm::plain(ANSWERS).map_err(text)?);
        let _: bool =
            target.order(&TargetCommand::Connect(EndpointDescriptor::new(&inbox, ANSWERS)))?;
        let (step, places) = (0, None);
        let (trace, _inbox) = (Mutex::default(), inbox);
        let this = Self { target, engine, src, dst, imm, answers, step, places, trace, _inbox };
        this.touch()?;
        Ok(this)
    }

    /// Writes the whole region once, as a long-lived peer will have: what maps lazily is mapped.
    fn touch(&self) -> TextResult<()> {
        finish(&self.submit(&[Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: &self.dst, offset: 0 },
            len: self.src.len(),
            imm: None,
        }])?)
    }

    pub(super) fn measure(&mut self, request: &Request) -> TextResult<Reply> {
        let walk = Walk::new(request, self.src.len())?;
        let positive = [request.operations, request.pages, request.samples, request.threads];
        if positive.contains(&0) {
            return Err("operations, pages, samples and threads must be positive".into());
        }
        if request.verify {
            let _: bool = self.target.order(&TargetCommand::Clear)?;
            self.step = 0;
        }
        let seconds = match request.kind {
            Kind::Echo => self.echo(request, &walk)?,
            _ => self.one_way(request, &walk)?,
        };
        if request.verify {
            let check = TargetCommand::Check { walk, steps: self.step };
            if let Some(fault) = self.target.order::<Option<String>>(&check)? {
                return Err(fault);
            }
        }
        let kind = self.engine.transport(self.dst.peer());
        let transport = kind.map_or("none".into(), |k| k.to_string());
        let trace = std::mem::take(&mut *self.trace.lock().map_err(text)?);
        Ok(Reply { seconds, transport, trace })
    }

    fn one_way(&mut self, request: &Request, walk: &Walk) -> TextResult<Vec<f64>> {
        let counts = request.operations * walk.pages;
        let notice = request.notice;
        // A receiver that spins is told of each sample anew, so that it sleeps in between; the
        // others wait as long as it takes, and answer, so that the next sample can follow at once.
        let answer = notice != Notice::Spin;
        let rounds = if answer { request.samples } else { 1 };
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        while starts.len() < request.samples as usize {
            let _: bool =
                self.target.order(&TargetCommand::Watch { rounds, counts, notice, answer })?;
            for _ in 0..rounds {
                let pages = self.pages(request, walk)?;
                if request.rest_us > 0 {
                    std::thread::sleep(Duration::from_micros(request.rest_us));
                }
                let seen = self.answers.arrived() + u64::from(answer);
                starts.push(Time::now().0);
                self.sample(request, walk, &pages)?;
                spin_until(
                    || self.answers.poll().is_ok_and(|n| n >= seen),
                    "the target does not answer",
                )?;
            }
            let times: Vec<u64> = read_line(&mut self.target.from)?;
            ends.extend(times);
        }
        if starts.len() != ends.len() {
            return Err(format!("{} samples, {} were noticed", starts.len(), ends.len()));
        }
        let share = 1e-9 / f64::from(request.operations);
        let took = |(start, end): (&u64, &u64)| end.saturating_sub(*start) as f64 * share;
        Ok(starts.iter().zip(&ends).map(took).collect())
    }

    fn echo(&mut self, request: &Request, walk: &Walk) -> TextResult<Vec<f64>> {
        let (rounds, counts) = (request.samples * request.operations, 1);
        let notice = Notice::Spin;
        let watch = TargetCommand::Watch { rounds, counts, notice, answer: true };
        let _: bool = self.target.order(&watch)?;
        let mut seconds = Vec::with_capacity(request.samples as usize);
        let mut seen = self.answers.arrived();
        for _ in 0..request.samples {
            let start = Time::now();
            for _ in 0..request.operations {
                seen += 1;
                self.submit(&[self.write(walk, self.step)])?;
                self.step += 1;
                spin_until(
                    || self.answers.poll().is_ok_and(|n| n >= seen),
                    "the target does not answer",
                )?;
            }
            let half = 0.5 / f64::from(request.operations);
            seconds.push(Time::now().since(start).as_secs_f64() * half);
        }
        let _: Vec<u64> = read_line(&mut self.target.from)?;
        Ok(seconds)
    }

    /// The operations of one sample.
    fn sample(
        &mut self,
        request: &Request,
        walk: &Walk,
        pages: &[(Pages, Pages)],
    ) -> TextResult<()> {
        let first = self.step;
        let end = first + u64::from(request.operations);
        self.step = end;
        match request.kind {
            Kind::Pages => pages.iter().try_for_each(|(src_pages, dst_pages)| {
                finish(&self.submit(&[Op::WritePages {
                    page_len: walk.bytes,
                    src: &self.src,
                    src_pages,
                    dst: &self.dst,
                    dst_pages,
                    imm: Some(self.imm),
                }])?)
            }),
            Kind::Rate => {
                let mut last = None;
                for step in first..end {
                    last = Some(self.submit(&[self.write(walk, step)])?);
                }
                last.as_ref().map_or(Ok(()), finish)
            }
            Kind::Batch => {
                let mut last = None;
                let mut ops = Vec::with_capacity(request.pages as usize);
                for from in (first..end).step_by(request.pages as usize) {
                    let to = end.min(from + u64::from(request.pages));
                    ops.clear();
                    ops.extend((from..to).map(|step| self.write(walk, step)));
                    last = Some(self.submit(&ops)?);
                }
                last.as_ref().map_or(Ok(()), finish)
            }
            Kind::Window => {
                let (this, threads) = (&*self, u64::from(request.threads));
                let each = (request.pages as usize).div_ceil(request.threads as usize);
                let each = (each, request.trace);
                let share = |n: u64| first + u64::from(request.operations) * n / threads;
                std::thread::scope(|scope| {
                    let others: Vec<_> = (1..threads)
                        .map(|n| {
                            scope.spawn(move || this.window(walk, share(n)..share(n + 1), each))
                        })
                        .collect();
                    let mine = this.window(walk, share(0)..share(1), each);
                    let joined = |t: std::thread::ScopedJoinHandle<'_, _>| {
                        t.join().unwrap_or_else(|_| Err("a submitting thread panicked".into()))
                    };
                    others.into_iter().map(joined).fold(mine, Result::and)
                })
            }
            Kind::Write | Kind::Echo => {
                (first..end).try_for_each(|step| finish(&self.submit(&[self.write(walk, step)])?))
            }
        }
    }

    /// Writes one after the other, of which so many are in flight at most.
    fn window(
        &self,
        walk: &Walk,
        steps: Range<u64>,
        (most, trace): (usize, bool),
    ) -> TextResult<()> {
        let mut flying: VecDeque<(u64, Handle)> = VecDeque::with_capacity(most);
        let mut over = Vec::new();
        let mut land = |(began, handle): (u64, Handle)| {
            finish(&handle)?;
            if trace {
                over.push((began, Time::now().0));
            }
            Ok::<_, String>(())
        };
        for step in steps {
            if flying.len() == most {
                flying.pop_front().map_or(Ok(()), &mut land)?;
            }
            let began = if trace { Time::now().0 } else { 0 };
            let handle = self.submit(&[self.write(walk, step)])?;
            // A polling thread keeps the worker asleep, which would take a core from the target.
            handle.drive();
            flying.push_back((began, handle));
        }
        flying.into_iter().try_for_each(land)?;
        self.trace.lock().map_err(text)?.append(&mut over);
        Ok(())
    }

    fn write(&self, walk: &Walk, step: u64) -> Op<'_> {
        let offset = walk.first(step) * walk.bytes;
        Op::Write {
            src: Local { region: &self.src, offset },
            dst: Remote { region: &self.dst, offset },
            len: walk.bytes,
            imm: Some(self.imm),
        }
    }

    /// The pages of one sample's calls, made before its clock starts.
    fn pages(&mut self, request: &Request, walk: &Walk) -> TextResult<Vec<(Pages, Pages)>> {
        if request.kind != Kind::Pages {
            return Ok(Vec::new());
        }
        let known = self.places.take().filter(|(of, _)| of == walk);
        let (_, places) = self.places.insert(known.unwrap_or((walk.clone(), walk.places())));
        (self.step..self.step + u64::from(request.operations))
            .map(|step| {
                let first = walk.first(step) as usize;
                let to = &places[first..first + walk.pages as usize];
                let from = PageIndices::range(first as u32, walk.pages).map_err(text)?;
                let to = PageIndices::list(to).map_err(text)?;
                Ok((Pages::new(from, walk.bytes, 0), Pages::new(to, walk.bytes, 0)))
            })
            .collect()
    }

    fn submit(&self, ops: &[Op<'_>]) -> TextResult<Handle> {
        self.engine.submit(ops, Submit::default()).map_err(text)
    }
}

fn finish(handle: &Handle) -> TextResult<()> {
    handle.wait(LONG).ok_or("a write does not end")?.map_err(text)
}
