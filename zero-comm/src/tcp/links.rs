//! Connections to some peers, all used by one thread at a time.

use std::hint;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zero_core::Rank;

use super::counters::Counters;
use crate::CommError;
use crate::process::{Incoming, Links, Outgoing, Wait};

/// How often the sockets are tried before others get the core, if there is a core for every rank.
const SPINS: u32 = 40;

/// How often they are tried, while others get the core between, before the thread sleeps.
const YIELDS: u32 = 30;

#[derive(Debug)]
pub(super) struct TcpLinks {
    peers: Vec<Peer>,
    counters: Arc<Counters>,
    spins: u32,
    piece_bytes: usize,
}

#[derive(Debug)]
struct Peer {
    rank: Rank,
    stream: TcpStream,
    /// Whether the connection is of no use any more. Why the peer closed it, the world will learn: if it died
    /// or finished, by the coordinator, and else by the deadline.
    is_lost: AtomicBool,
}

impl Peer {
    /// How many bytes `act` moves; none if it would have to wait.
    fn attempt(&self, mut act: impl FnMut(&TcpStream) -> io::Result<usize>) -> usize {
        while !self.is_lost.load(Ordering::Relaxed) {
            match act(&self.stream) {
                Ok(count) => return count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return 0,
                Err(error) => {
                    tracing::debug!(peer = %self.rank, %error, "lost a connection");
                    self.is_lost.store(true, Ordering::Relaxed);
                }
            }
        }
        0
    }
}

impl TcpLinks {
    /// Links over `streams`, by index.
    pub(super) fn new(
        streams: Vec<(Rank, TcpStream)>,
        counters: &Arc<Counters>,
        (may_spin, piece_bytes): (bool, usize),
    ) -> io::Result<Self> {
        let mut peers = Vec::with_capacity(streams.len());
        for (rank, stream) in streams {
            stream.set_nonblocking(true)?;
            peers.push(Peer { rank, stream, is_lost: AtomicBool::new(false) });
        }
        let spins = if may_spin { SPINS } else { 0 };
        Ok(Self { peers, counters: Arc::clone(counters), spins, piece_bytes })
    }

    /// Moves what can be moved without waiting; whether anything did.
    fn move_some(&self, sends: &mut [Outgoing<'_>], receives: &mut [Incoming<'_>]) -> bool {
        let mut moved = 0;
        // Of the transfers of one peer only the first that is not complete may move.
        let mut blocked = vec![false; self.peers.len()];
        for receive in receives.iter_mut() {
            if blocked[receive.peer] || receive.done == receive.bytes.len() {
                continue;
            }
            let peer = &self.peers[receive.peer];
            let count = peer.attempt(|mut stream| match stream.read(&mut receive.bytes[receive.done..]) {
                Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed it")),
                outcome => outcome,
            });
            receive.done += count;
            moved += count;
            self.counters.add_received(count);
            blocked[receive.peer] = receive.done < receive.bytes.len();
        }
        blocked.fill(false);
        for send in sends.iter_mut() {
            if blocked[send.peer] || send.done == send.bytes.len() {
                continue;
            }
            let peer = &self.peers[send.peer];
            let count = peer.attempt(|mut stream| stream.write(&send.bytes[send.done..]));
            send.done += count;
            moved += count;
            self.counters.add_sent(count);
            blocked[send.peer] = send.done < send.bytes.len();
        }
        moved > 0
    }

    /// Sleeps until a peer that is waited for has something to say or can listen, but no longer than `limit`.
    fn sleep(&self, interest: &[PollFlags], limit: Duration) {
        let mut polled: Vec<_> = self
            .peers
            .iter()
            .zip(interest)
            .filter(|(peer, flags)| !flags.is_empty() && !peer.is_lost.load(Ordering::Relaxed))
            .map(|(peer, flags)| PollFd::new(&peer.stream, *flags))
            .collect();
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whatever it was: the next attempt to move tells.
        let _ = poll(&mut polled, Some(&limit));
    }
}

impl Links for TcpLinks {
    fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    fn transfer(
        &self,
        sends: &mut [Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let waits_for_sends = receives.is_empty();
        let (mut spins, mut has_slept) = (0, false);
        loop {
            let moved = self.move_some(sends, receives);
            let mut interest = vec![PollFlags::empty(); self.peers.len()];
            let mut is_complete = true;
            for receive in receives.iter().filter(|receive| receive.done < receive.bytes.len()) {
                interest[receive.peer] |= PollFlags::IN;
                is_complete = false;
            }
            for send in sends.iter().filter(|send| send.done < send.bytes.len()) {
                interest[send.peer] |= PollFlags::OUT;
                is_complete &= !waits_for_sends;
            }
            if is_complete {
                return Ok(());
            }
            if moved {
                wait.progressed();
                (spins, has_slept) = (0, false);
                continue;
            }
            if spins < self.spins {
                spins += 1;
                hint::spin_loop();
                continue;
            }
            if spins < self.spins + YIELDS {
                spins += 1;
                thread::yield_now();
                continue;
            }
            // What has come counts, even if the world has failed since.
            if has_slept {
                wait.check(|| {
                    let waited = self.peers.iter().zip(&interest).filter(|(_, flags)| !flags.is_empty());
                    waited.map(|(peer, _)| peer.rank).collect()
                })?;
            }
            self.sleep(&interest, wait.slice());
            has_slept = true;
        }
    }
}
