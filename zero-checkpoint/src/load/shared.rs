//! Chunks that several ranks of a host want: each is read by one of them, which sends it to the others.

use zero_core::Rank;

use crate::coordinator::{Coordinator, consult};
use crate::error::CheckpointError;
use crate::load::blocks::{Block, Buffers};
use crate::load::checkpoint::Checkpoint;
use crate::load::deliver::Delivery;

/// Runs of chunks by who wants them.
pub(crate) struct Division {
    /// What this rank alone wants.
    pub(crate) own: Vec<Block>,
    /// What several want; the same on all ranks.
    shared: Vec<Block>,
}

/// Tells the ranks of a host what each of them wants.
pub(crate) fn divide(
    coordinator: &dyn Coordinator,
    runs: Result<Vec<Block>, CheckpointError>,
) -> Result<Division, CheckpointError> {
    let encoded = runs.map(|runs| {
        let numbers = runs.iter().flat_map(|run| [run.file, run.chunks.start, run.chunks.end]);
        numbers.flat_map(|number| (number as u64).to_le_bytes()).collect::<Vec<u8>>()
    });
    let all = consult(coordinator, encoded, |lists| {
        let with_length = |list: &Vec<u8>| [&(list.len() as u64).to_le_bytes()[..], list].concat();
        Ok(lists.iter().flat_map(with_length).collect())
    })?;
    let odd = || CheckpointError::Coordination { source: "the root's answer is cut".into() };
    let mut rest = all.as_slice();
    let mut wanted = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk() {
        let (list, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize).ok_or_else(odd)?;
        wanted.push(decode(list));
        rest = after;
    }
    Ok(by_need(&wanted, coordinator.rank()))
}

fn decode(list: &[u8]) -> Vec<Block> {
    let numbers: Vec<usize> = list
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()) as usize)
        .collect();
    numbers.chunks_exact(3).map(|run| Block { file: run[0], chunks: run[1]..run[2] }).collect()
}

/// A sweep over the places where a run of anybody begins or ends.
fn by_need(wanted: &[Vec<Block>], rank: Rank) -> Division {
    let mut edges = Vec::new();
    for (index, runs) in wanted.iter().enumerate() {
        let own = i64::from(index == rank.index());
        for run in runs {
            edges.push((run.file, run.chunks.start, 1, own));
            edges.push((run.file, run.chunks.end, -1, -own));
        }
    }
    edges.sort_unstable();
    let mut division = Division { own: Vec::new(), shared: Vec::new() };
    let (mut needs, mut own_needs) = (0, 0);
    let mut last = (0, 0);
    for (file, chunk, all, own) in edges {
        if needs > 0 && chunk > last.1 {
            let run = Block { file: last.0, chunks: last.1..chunk };
            if needs > 1 {
                push(&mut division.shared, run);
            } else if own_needs > 0 {
                push(&mut division.own, run);
            }
        }
        needs += all;
        own_needs += own;
        last = (file, chunk);
    }
    division
}

fn push(runs: &mut Vec<Block>, run: Block) {
    match runs.last_mut() {
        Some(last) if last.file == run.file && last.chunks.end == run.chunks.start => {
            last.chunks.end = run.chunks.end;
        }
        _ => runs.push(run),
    }
}

const READ: u8 = 0;
const FAILED: u8 = 1;

impl Division {
    /// Reads what several ranks want, in turns, and gives this rank its part of it; the bytes that it read itself.
    ///
    /// A rank that cannot read tells all, and all stop. One that cannot take what it wanted goes on for the others' sake.
    pub(crate) fn read_shared(
        &self,
        checkpoint: &Checkpoint,
        coordinator: &dyn Coordinator,
        buffers: &mut Buffers,
        delivery: &mut Delivery<'_, '_>,
    ) -> Result<u64, CheckpointError> {
        let lost = |source| CheckpointError::Coordination { source };
        let (rank, world) = (coordinator.rank().index(), coordinator.world_size().get());
        let each = buffers.each();
        let (own, received) = buffers.two();
        let blocks = Block::cut(self.shared.iter().cloned(), each, checkpoint.manifest().chunk_bytes);
        let mut bytes_read = 0;
        let mut taken = Ok(());
        for round in blocks.chunks(world) {
            let mut done = Ok(());
            if let Some(block) = round.get(rank) {
                let range = block.bytes(checkpoint);
                let len = (range.end - range.start) as usize;
                done = checkpoint.read_chunks(block.file, block.chunks.start, &mut own[..len]);
                bytes_read += len as u64;
            }
            for (reader, block) in round.iter().enumerate() {
                let range = block.bytes(checkpoint);
                let len = (range.end - range.start) as usize;
                let reads = reader == rank;
                let mut status = [if reads && done.is_err() { FAILED } else { READ }];
                coordinator.broadcast(Rank::new(reader), &mut status).map_err(lost)?;
                if status != [READ] {
                    done?;
                    let reason = format!("it could not read {}", checkpoint.shown(block.file));
                    return Err(CheckpointError::Elsewhere { rank: Rank::new(reader), reason });
                }
                let content = if reads { &mut own[..len] } else { &mut received[..len] };
                coordinator.broadcast(Rank::new(reader), content).map_err(lost)?;
                if taken.is_ok() {
                    taken = delivery.give(block.file, range.start, content);
                }
            }
        }
        taken.map(|()| bytes_read)
    }
}

#[cfg(test)]
mod tests {
    use zero_core::Rank;

    use super::{Block, by_need};

    #[test]
    fn what_several_want_is_shared_and_the_rest_ones_own() {
        let run = |file, chunks| Block { file, chunks };
        let wanted = [
            vec![run(0, 0..4), run(1, 0..2)],
            vec![run(0, 3..6), run(1, 1..2), run(1, 2..3)],
            vec![run(0, 5..6)],
        ];
        let first = by_need(&wanted, Rank::new(0));
        assert_eq!(first.own, [run(0, 0..3), run(1, 0..1)]);
        assert_eq!(first.shared, [run(0, 3..4), run(0, 5..6), run(1, 1..2)]);
        let second = by_need(&wanted, Rank::new(1));
        assert_eq!(second.own, [run(0, 4..5), run(1, 2..3)]);
        assert_eq!(second.shared, first.shared);
        assert_eq!(by_need(&wanted, Rank::new(2)).own, []);
    }
}
