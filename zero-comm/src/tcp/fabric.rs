//! How ranks reach each other over TCP.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use zero_core::Rank;

use super::channel::{Channel, Purpose};
use super::counters::Counters;
use super::door::{self, Door};
use super::links::TcpLinks;
use super::service::Service;
use crate::control::{Reception, Token};
use crate::flight::GroupId;
use crate::process::{Fabric, Incoming, Links, Outgoing, Standing, Wait};
use crate::reading::{ReadAnswer, ReadRequest};
use crate::windows::Windows;
use crate::{CommError, WindowKey, lock};

/// How much ranks of one host all-reduce at once, all together: what is under way fits their caches.
const PIECES_HERE: usize = 2 << 20;
const LEAST_PIECE: usize = 128 << 10;

/// How much ranks of several hosts all-reduce at once.
const PIECE_AFAR: usize = 4 << 20;

/// A listening socket of a rank that does not know yet where the others are.
#[derive(Debug)]
pub(crate) struct Unstarted {
    listener: TcpListener,
    address: SocketAddr,
}

/// Reaches other ranks over TCP.
pub(crate) struct TcpFabric {
    standing: Arc<Standing>,
    door: Arc<Door>,
    service: Arc<Service>,
    counters: Arc<Counters>,
    /// By rank: connections for reads that nobody uses now.
    idle: Mutex<HashMap<Rank, Vec<TcpLinks>>>,
    reception: Reception,
    may_spin: bool,
    piece_bytes: usize,
}

impl TcpFabric {
    /// Listens at a free port of `interface`.
    pub(crate) fn bind(interface: IpAddr) -> io::Result<Unstarted> {
        let listener = TcpListener::bind((interface, 0))?;
        Ok(Unstarted { address: listener.local_addr()?, listener })
    }

    fn links(&self, streams: Vec<(Rank, TcpStream)>, wait: &Wait<'_>) -> Result<TcpLinks, CommError> {
        let peer = streams.first().map_or(self.standing.rank(), |(rank, _)| *rank);
        TcpLinks::new(streams, &self.counters, (self.may_spin, self.piece_bytes))
            .map_err(|error| wait.broken(peer, &error.to_string()))
    }

    fn message_link(&self, channel: Channel, peer: Rank, wait: &Wait<'_>) -> Result<TcpLinks, CommError> {
        let stream = if channel.to == peer {
            self.door.dial(peer, channel.purpose, wait)?
        } else {
            self.door.claim(channel, wait)?
        };
        self.links(vec![(peer, stream)], wait)
    }

    /// What [`Counters::get`] says.
    #[cfg(test)]
    pub(crate) fn moved(&self) -> (u64, u64) {
        self.counters.get()
    }
}

impl Unstarted {
    /// Where other ranks find this one.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets other ranks in that know `token`; `addresses` are those of all ranks.
    pub(crate) fn start(
        self,
        standing: Arc<Standing>,
        addresses: Vec<Option<SocketAddr>>,
        token: Token,
    ) -> io::Result<TcpFabric> {
        let service = Arc::<Service>::default();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let may_spin = standing.size().get() <= cores;
        // Of what all ranks know alike, because pieces must be the same on all.
        let piece_bytes = if addresses.iter().flatten().all(|address| address.ip().is_loopback()) {
            (PIECES_HERE / standing.size().get().next_power_of_two()).max(LEAST_PIECE)
        } else {
            PIECE_AFAR
        };
        let (size, own) = (standing.size(), Arc::clone(&standing));
        let door = Arc::new(Door::new(own, token.clone(), addresses, Arc::clone(&service)));
        let reception = Reception::open(self.listener, token, door::PURPOSE, size, Arc::clone(&door))?;
        Ok(TcpFabric {
            standing,
            door,
            service,
            counters: Arc::default(),
            idle: Mutex::default(),
            reception,
            may_spin,
            piece_bytes,
        })
    }
}

impl Fabric for TcpFabric {
    fn collective(
        &self,
        group: GroupId,
        peers: &[Rank],
        wait: &mut Wait<'_>,
    ) -> Result<Box<dyn Links>, CommError> {
        let (own, purpose) = (self.standing.rank(), Purpose::Collective(group));
        // All dial first, so that none waits for a rank that waits for it.
        let mut streams: Vec<Option<TcpStream>> = Vec::with_capacity(peers.len());
        for peer in peers {
            streams.push(if *peer < own { Some(self.door.dial(*peer, purpose, wait)?) } else { None });
        }
        let mut linked = Vec::with_capacity(peers.len());
        for (peer, dialed) in peers.iter().zip(streams) {
            let channel = Channel { purpose, from: *peer, to: own };
            linked.push((*peer, dialed.map_or_else(|| self.door.claim(channel, wait), Ok)?));
        }
        Ok(Box::new(self.links(linked, wait)?))
    }

    fn sender(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError> {
        let channel = Channel { purpose: Purpose::Messages(group), from: self.standing.rank(), to: peer };
        Ok(Box::new(self.message_link(channel, peer, wait)?))
    }

    fn receiver(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError> {
        let channel = Channel { purpose: Purpose::Messages(group), from: peer, to: self.standing.rank() };
        Ok(Box::new(self.message_link(channel, peer, wait)?))
    }

    fn serve(&self, group: GroupId, windows: Arc<Windows>) {
        self.service.serve(group, windows);
    }

    fn forget(&self, group: GroupId) -> Option<Arc<Windows>> {
        self.service.forget(group)
    }

    fn read(
        &self,
        group: GroupId,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let idle = lock(&self.idle).entry(peer).or_default().pop();
        let link = match idle {
            Some(link) => link,
            None => self.links(vec![(peer, self.door.dial(peer, Purpose::Windows, wait)?)], wait)?,
        };
        let request = ReadRequest::new(group, key, offset, into);
        let mut answer = [0; ReadAnswer::BYTES];
        link.transfer(
            &mut [Outgoing { peer: 0, bytes: &request.encode(), done: 0 }],
            &mut [Incoming { peer: 0, bytes: &mut answer, done: 0 }],
            wait,
        )?;
        let Some(answer) = ReadAnswer::decode(&answer) else {
            return Err(wait.broken(peer, "its answer to a read makes no sense"));
        };
        let outcome = answer.check(peer, &request, wait).and_then(|()| {
            if into.is_empty() {
                return Ok(());
            }
            link.transfer(&mut [], &mut [Incoming { peer: 0, bytes: into, done: 0 }], wait)
        });
        let is_usable = !matches!(
            outcome,
            Err(CommError::Timeout { .. } | CommError::PeerLost { .. } | CommError::Aborted { .. })
        );
        if is_usable {
            lock(&self.idle).entry(peer).or_default().push(link);
        }
        outcome
    }
}

impl Drop for TcpFabric {
    fn drop(&mut self) {
        self.reception.close();
        self.service.close();
    }
}

impl fmt::Debug for TcpFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpFabric").field("rank", &self.standing.rank()).finish_non_exhaustive()
    }
}
