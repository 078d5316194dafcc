//! Links over MPI.

use std::sync::{Arc, Mutex};

use zero_core::Rank;

use super::board::Board;
use super::inbox::Reader;
use super::news::News;
use super::outbox::Writer;
use super::raw::Tag;
use crate::process::{Incoming, Links, Outgoing, Wait};
use crate::{CommError, lock};

/// Links to some ranks; in both directions, or in one.
#[derive(Debug)]
pub(super) struct MpiLinks {
    board: Arc<Board>,
    peers: Vec<Rank>,
    /// Rings when any of the streams may go on.
    news: Arc<News>,
    streams: Mutex<Streams>,
}

/// Those of one peer have its index. A direction that does not exist has none.
#[derive(Debug)]
struct Streams {
    writers: Vec<Writer>,
    readers: Vec<Reader>,
}

impl MpiLinks {
    /// Links to `peers` with these tags, or with none if there is nothing to send or nothing to receive.
    pub(super) fn new(board: &Arc<Board>, peers: &[Rank], outgoing: &[Tag], incoming: &[Tag]) -> Self {
        let news = Arc::new(News::default());
        let writers = peers.iter().zip(outgoing).map(|(peer, tag)| Writer::new(*peer, *tag, &news)).collect();
        let readers = peers.iter().zip(incoming).map(|(peer, tag)| Reader::new(*peer, *tag, &news)).collect();
        let streams = Mutex::new(Streams { writers, readers });
        Self { board: Arc::clone(board), peers: peers.to_vec(), news, streams }
    }
}

impl Links for MpiLinks {
    fn piece_bytes(&self) -> usize {
        4 << 20
    }

    fn transfer(
        &self,
        sends: &mut [Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        self.board.check(wait)?;
        let mut streams = lock(&self.streams);
        let Streams { writers, readers } = &mut *streams;
        for (index, reader) in readers.iter_mut().enumerate() {
            let ours = receives.iter().filter(|receive| receive.peer == index);
            reader.want(&self.board, ours.map(|receive| receive.bytes.len() - receive.done).sum());
        }
        loop {
            // A look for all transfers of a peer: a later one must not find what an earlier one did not.
            writers.iter_mut().for_each(Writer::look);
            readers.iter_mut().for_each(|reader| reader.look(&self.board));
            let mut moved = false;
            for send in &mut *sends {
                moved |= writers[send.peer].write(&self.board, send.bytes, &mut send.done);
            }
            for receive in &mut *receives {
                moved |= readers[receive.peer].read(&self.board, receive.bytes, &mut receive.done);
            }
            let mut missing: Vec<_> = if receives.is_empty() {
                sends.iter().filter(|send| send.done < send.bytes.len()).map(|send| send.peer).collect()
            } else {
                let unfinished = receives.iter().filter(|receive| receive.done < receive.bytes.len());
                unfinished.map(|receive| receive.peer).collect()
            };
            if missing.is_empty() {
                return Ok(());
            }
            self.board.rest(moved, &self.news, wait, || {
                missing.sort_unstable();
                missing.dedup();
                missing.into_iter().map(|peer| self.peers[peer]).collect()
            })?;
        }
    }
}
