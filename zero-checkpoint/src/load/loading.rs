//! The load of a checkpoint into the intervals of this rank.

use crate::coordinator::{Coordinator, agree};
use crate::error::CheckpointError;
use crate::load::blocks::{self, Block, Buffers, Segment};
use crate::load::checkpoint::Checkpoint;
use crate::load::deliver::{Delivery, Named};
use crate::load::difference::matches;
use crate::load::shared;
use crate::load::wanted::{LoadOptions, LoadReport, LoadedParameter, Wanted, WantedParameter};

impl Checkpoint {
    /// Loads what is wanted, whatever ranks have saved it. Hashes are checked on the way.
    ///
    /// `host` joins the ranks that share a host; they all call this with the same options. Each byte is read by one of
    /// them at most, and it fails on all of them or on none; ranks on other hosts do not hear of it. Without other ranks, or
    /// to have each rank read for itself, pass [`Solo`](crate::Solo).
    ///
    /// Targets hold anything after an error.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Differences`] if checkpoint and model do not go together;
    /// [`Corrupt`](CheckpointError::Corrupt), [`FileLength`](CheckpointError::FileLength) or
    /// [`Storage`](CheckpointError::Storage) if a file does not have what the manifest says; what a target fails with;
    /// [`Elsewhere`](CheckpointError::Elsewhere) if it is so on another rank.
    pub fn load(
        &self,
        mut wanted: Wanted<'_>,
        options: &LoadOptions,
        host: &dyn Coordinator,
    ) -> Result<LoadReport, CheckpointError> {
        let chunk = self.manifest().chunk_bytes;
        let planned = self
            .plan(&mut wanted, options)
            .and_then(|(report, delivery)| Ok((report, delivery, Buffers::new(options.buffer, chunk)?)));
        let runs = match &planned {
            Ok((_, delivery, _)) => Ok(Block::touched(delivery.segments(), chunk)),
            // It goes to the others by its text, and to the caller itself.
            Err(error) => Err(CheckpointError::NotLoaded { reason: error.to_string() }),
        };
        let division = shared::divide(host, runs);
        let (mut report, mut delivery, mut buffers) = planned?;
        let division = division?;

        let own = division.read_shared(self, host, &mut buffers, &mut delivery).and_then(|shared| {
            let blocks = Block::cut(division.own, buffers.each(), chunk);
            let own = blocks::read(self, &blocks, &mut buffers, |block, content| {
                delivery.give(block.file, block.bytes(self).start, content)
            })?;
            report.bytes_read = shared + own;
            Ok(())
        });
        agree(host, own)?;
        Ok(report)
    }

    /// What is to be read, and where each part goes.
    fn plan<'t, 'a>(
        &self,
        wanted: &'t mut Wanted<'a>,
        options: &LoadOptions,
    ) -> Result<(LoadReport, Delivery<'t, 'a>), CheckpointError> {
        wanted.parameters.iter().try_for_each(WantedParameter::check)?;
        let records = matches(self.manifest(), &wanted.parameters, options)
            .map_err(|differences| CheckpointError::Differences { place: self.place(), differences })?;
        let mut report = LoadReport::default();
        let (mut targets, mut segments) = (Vec::new(), Vec::new());
        for (parameter, record) in wanted.parameters.iter_mut().zip(records) {
            let mut loaded = LoadedParameter::none(parameter);
            if let Some(record) = record {
                loaded.fill(parameter, record, options);
                let WantedParameter { spec, range, values, states, .. } = parameter;
                let mut add = |what, target: &'t mut _, record: Option<_>| {
                    if let Some(record) = record {
                        segments.extend(Segment::of(record, range, targets.len()));
                        targets.push(Named { parameter: &spec.name, what, target });
                    }
                };
                add("values", values, Some(&record.values));
                for state in states.iter_mut().filter(|_| options.optimizer) {
                    add(&state.name, &mut state.target, record.states.get(&state.name));
                }
            }
            report.parameters.push(loaded);
        }
        Ok((report, Delivery::new(targets, segments)))
    }
}
