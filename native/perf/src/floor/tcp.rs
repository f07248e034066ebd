//! Loopback TCP with nothing around it: streams, ping-pong, wake-ups and small records.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::raw::{accept_unpaced, set_socket_buffers};
use super::signals::{one_way, UNTIL_PARKED};
use super::{Request, Temperature, TextResult, Wait};

const RECORD: usize = 32;
const MESSAGE: usize = 8;
/// As long as the engine's acknowledgement.
const ANSWER: usize = 64;

/// A connected pair, with the request's buffers and way of waiting on both ends. The first end
/// sends: it was accepted, and is not paced.
fn pair(request: &Request) -> TextResult<(TcpStream, TcpStream)> {
    let failed = |error: io::Error| broken(&error);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    accept_unpaced(&listener)?;
    let connect = || -> io::Result<(TcpStream, TcpStream)> {
        let far = TcpStream::connect(listener.local_addr()?)?;
        let (near, _) = listener.accept()?;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
            end.set_nonblocking(request.wait == Wait::Spin)?;
        }
        Ok((near, far))
    };
    let (near, far) = connect().map_err(failed)?;
    if request.socket_buffer > 0 {
        set_socket_buffers(&near, request.socket_buffer)?;
        set_socket_buffers(&far, request.socket_buffer)?;
    }
    Ok((near, far))
}

fn broken(error: &io::Error) -> String {
    format!("a loopback TCP connection failed: {error}")
}

fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive(mut stream: &TcpStream, mut bytes: &mut [u8]) -> io::Result<()> {
    let mut idle = 0u32;
    while !bytes.is_empty() {
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                idle = idle.wrapping_add(1);
                if idle & 4095 == 0 {
                    thread::yield_now();
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Blocks of `bytes` x `pages`, from the first send call until the receiver has the last byte in
/// its place. They follow one another, or each waits for an answer to the one before.
pub fn stream(request: &Request, source: &[u8], target: &mut [u8]) -> TextResult<Vec<f64>> {
    let (near, far) = pair(request)?;
    let block = request.bytes * request.pages;
    let blocks = match request.temperature {
        Temperature::Cold => source.len() / block,
        Temperature::Hot => 1,
    };
    let place = |step: usize| (step % blocks) * block;
    let (done, stamps) = mpsc::channel::<Instant>();
    let (ready, go) = mpsc::channel::<()>();
    let run = || -> io::Result<Vec<f64>> {
        thread::scope(|scope| {
            scope.spawn(move || -> io::Result<()> {
                for batch in 0..request.batches {
                    let _ = ready.send(());
                    for step in 0..request.operations {
                        let at = place(batch * request.operations + step);
                        receive(&far, &mut target[at..at + block])?;
                        if request.answered {
                            send(&far, &[0u8; ANSWER])?;
                        }
                    }
                    let _ = done.send(Instant::now());
                }
                Ok(())
            });
            (0..request.batches)
                .map(|batch| {
                    go.recv().map_err(|_| ErrorKind::BrokenPipe)?;
                    let start = Instant::now();
                    for step in 0..request.operations {
                        let at = place(batch * request.operations + step);
                        send(&near, &source[at..at + block])?;
                        if request.answered {
                            receive(&near, &mut [0u8; ANSWER])?;
                        }
                    }
                    let end = stamps.recv().map_err(|_| ErrorKind::BrokenPipe)?;
                    let taken = end.saturating_duration_since(start);
                    Ok(taken.as_secs_f64() / request.operations as f64)
                })
                .collect()
        })
    };
    run().map_err(|error| broken(&error))
}

/// Half a round trip of 8 bytes.
pub fn pingpong(request: &Request) -> TextResult<Vec<f64>> {
    let (near, far) = pair(request)?;
    let trips = request.operations * request.batches;
    let run = || -> io::Result<Vec<f64>> {
        thread::scope(|scope| {
            scope.spawn(move || -> io::Result<()> {
                let mut message = [0u8; MESSAGE];
                for _ in 0..trips {
                    receive(&far, &mut message)?;
                    send(&far, &message)?;
                }
                Ok(())
            });
            let mut message = [1u8; MESSAGE];
            (0..request.batches)
                .map(|_| {
                    let start = Instant::now();
                    for _ in 0..request.operations {
                        send(&near, &message)?;
                        receive(&near, &mut message)?;
                    }
                    Ok(start.elapsed().as_secs_f64() / (2 * request.operations) as f64)
                })
                .collect()
        })
    };
    run().map_err(|error| broken(&error))
}

/// From the send call to the parked reader running, one way.
pub fn wake(request: &Request) -> TextResult<Vec<f64>> {
    let (near, far) = pair(&Request { wait: Wait::Block, ..request.clone() })?;
    let (woken, stamps) = mpsc::channel::<Instant>();
    let trips = request.operations * request.batches;
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut message = [0u8; MESSAGE];
            for _ in 0..trips {
                if receive(&far, &mut message).is_err() || woken.send(Instant::now()).is_err() {
                    return;
                }
            }
        });
        let mut failure = None;
        let seconds = one_way(request, || {
            thread::sleep(UNTIL_PARKED);
            let start = Instant::now();
            if let Err(error) = send(&near, &[1u8; MESSAGE]) {
                failure = Some(broken(&error));
            }
            let end = if failure.is_none() { stamps.recv().ok() } else { None };
            end.map_or(Duration::ZERO, |end| end.saturating_duration_since(start))
        });
        failure.map_or(Ok(seconds), Err)
    })
}

/// Small records, `pages` of them in each send call, until the reader has them all.
pub fn records(request: &Request) -> TextResult<Vec<f64>> {
    let (near, far) = pair(request)?;
    let (done, stamps) = mpsc::channel::<Instant>();
    let records = vec![1u8; request.pages * RECORD];
    let run = || -> io::Result<Vec<f64>> {
        thread::scope(|scope| {
            scope.spawn(move || -> io::Result<()> {
                let mut buffer = vec![0u8; 256 << 10];
                for _ in 0..request.batches {
                    let mut left = request.operations * RECORD;
                    while left > 0 {
                        let many = left.min(buffer.len());
                        match (&far).read(&mut buffer[..many]) {
                            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                            Ok(count) => left -= count,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                                std::hint::spin_loop();
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    let _ = done.send(Instant::now());
                }
                Ok(())
            });
            (0..request.batches)
                .map(|_| {
                    let start = Instant::now();
                    let mut left = request.operations;
                    while left > 0 {
                        let many = left.min(request.pages);
                        send(&near, &records[..many * RECORD])?;
                        left -= many;
                    }
                    let end = stamps.recv().map_err(|_| ErrorKind::BrokenPipe)?;
                    let taken = end.saturating_duration_since(start);
                    Ok(taken.as_secs_f64() / request.operations as f64)
                })
                .collect()
        })
    };
    run().map_err(|error| broken(&error))
}
