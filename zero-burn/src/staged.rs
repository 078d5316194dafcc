//! Tables on a disk while they are updated, and where they go back to.

use std::sync::Arc;

use zero_core::ParameterIndex;
use zero_offload::{StagedUpdate, Table};

use crate::engine::Engine;
use crate::fused_state::FusedState;

/// What an update has written to a disk beside what is there. Master weights stay as they are if it is dropped.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) engine: Arc<Engine>,
    /// By table.
    pub(crate) owners: Vec<Owner>,
    /// Nothing once it has ended.
    pub(crate) update: Option<StagedUpdate>,
}

/// Where a table belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) parameter: ParameterIndex,
    /// Whether its first column has master weights.
    pub(crate) has_master: bool,
}

impl Staged {
    /// Makes it final, or drops it; tables go back to where they were taken from.
    pub(crate) fn end(mut self, commit: bool, states: &mut [Option<FusedState>]) {
        if let Some(update) = self.update.take() {
            let tables = if commit { update.commit() } else { update.discard() };
            give_back(&self.engine, states, &self.owners, tables);
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(update) = self.update.take() {
            give_back(&self.engine, &mut [], &self.owners, update.discard());
        }
    }
}

/// The tables of one shard, in the order of its elements, each with whether its first column has master weights.
pub(crate) fn take(
    engine: &Engine,
    parameter: ParameterIndex,
    state: &mut FusedState,
) -> impl Iterator<Item = (Table, Owner)> {
    let mut tables = std::mem::take(&mut state.disk);
    let master = engine.masters_on_disk().and_then(|masters| masters.take(parameter));
    let has_master = master.is_some();
    if let Some(mut master) = master {
        // No more masters are on a disk than states: those of the last table are theirs.
        if let Some(states) = tables.pop() {
            master.append(states);
        }
        tables.push(master);
    }
    let last = tables.len();
    let owner = move |nth| Owner { parameter, has_master: has_master && nth + 1 == last };
    tables.into_iter().enumerate().map(move |(nth, table)| (table, owner(nth)))
}

/// Puts tables back where they were taken from; states that are gone take theirs with them.
pub(crate) fn give_back(
    engine: &Engine,
    states: &mut [Option<FusedState>],
    owners: &[Owner],
    tables: Vec<Table>,
) {
    for (mut table, owner) in tables.into_iter().zip(owners) {
        if let (true, Some(masters)) = (owner.has_master, engine.masters_on_disk()) {
            let states = table.split_off(1);
            masters.give_back(owner.parameter, std::mem::replace(&mut table, states));
        }
        if let (true, Some(Some(state))) = (table.width() > 0, states.get_mut(owner.parameter.index())) {
            state.disk.push(table);
        }
    }
}
