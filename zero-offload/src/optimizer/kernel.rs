//! The pass over memory that all optimizers share.

use std::mem;

use crate::blocks::{Blocks, BlocksMut};
use crate::floats::{Floats, FloatsMut};
use crate::simd::{LANES, Lanes, Operation};
use crate::workers::Split;

/// How many blocks ahead memory is fetched: what its latency is worth. Some processors stop at the end of a page by
/// themselves.
const AHEAD: usize = 8;

/// What tells one optimizer from another: where a gradient leads.
pub(super) trait Rule<const STATES: usize>: Copy + Sync {
    /// The direction of the step, and the new states.
    fn direction<L: Lanes>(
        &self,
        lanes: L,
        gradient: L::Floats,
        states: [L::Floats; STATES],
    ) -> (L::Floats, [L::Floats; STATES]);
}

/// One update of any elements.
#[derive(Clone, Copy)]
pub(super) struct Pass<R> {
    pub(super) rule: R,
    pub(super) gradient_factor: f32,
    /// What is added to the gradient, times the parameter.
    pub(super) penalty: Option<f32>,
    /// What is taken from the parameter, times itself.
    pub(super) decay: Option<f32>,
    /// What is taken from the parameter, times the direction.
    pub(super) step_size: f32,
}

impl<R> Pass<R> {
    /// The new parameters and states.
    #[inline(always)]
    fn update<L: Lanes, const STATES: usize>(
        &self,
        lanes: L,
        parameters: L::Floats,
        gradient: L::Floats,
        states: [L::Floats; STATES],
    ) -> (L::Floats, [L::Floats; STATES])
    where
        R: Rule<STATES>,
    {
        let mut gradient = lanes.mul(gradient, lanes.splat(self.gradient_factor));
        if let Some(penalty) = self.penalty {
            gradient = lanes.mul_add(parameters, lanes.splat(penalty), gradient);
        }
        let (direction, states) = self.rule.direction(lanes, gradient, states);
        let parameters = match self.decay {
            None => lanes.mul_add(direction, lanes.splat(-self.step_size), parameters),
            Some(decay) => {
                let decayed = lanes.mul(parameters, lanes.splat(decay));
                let taken = lanes.mul_add(direction, lanes.splat(self.step_size), decayed);
                lanes.sub(parameters, taken)
            }
        };
        (parameters, states)
    }
}

/// Elements that belong together; all slices have the same length.
pub(super) struct Tile<'a, const STATES: usize> {
    pub(super) parameters: &'a mut [f32],
    pub(super) gradient: Floats<'a>,
    pub(super) states: [FloatsMut<'a>; STATES],
    pub(super) copy: Option<FloatsMut<'a>>,
}

impl<const STATES: usize> Split for Tile<'_, STATES> {
    fn len(&self) -> usize {
        self.parameters.len()
    }

    fn split(self, at: usize) -> (Self, Self) {
        let Self { parameters, gradient, mut states, copy } = self;
        let (parameters, later_parameters) = parameters.split_at_mut(at);
        let (gradient, later_gradient) = gradient.split(at);
        let later_states = states.each_mut().map(|state| {
            let (first, later) = mem::take(state).split(at);
            *state = first;
            later
        });
        let (copy, later_copy) = copy.map(|copy| copy.split(at)).unzip();
        let later = Self {
            parameters: later_parameters,
            gradient: later_gradient,
            states: later_states,
            copy: later_copy,
        };
        (Self { parameters, gradient, states, copy }, later)
    }
}

/// An update of a tile.
pub(super) struct UpdateTile<'a, R, const STATES: usize> {
    pub(super) pass: Pass<R>,
    pub(super) tile: Tile<'a, STATES>,
}

impl<R: Rule<STATES>, const STATES: usize> Operation for UpdateTile<'_, R, STATES> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { pass, tile } = self;
        let whole = tile.len() - tile.len() % LANES;
        let (tile, rest) = tile.split(whole);
        let gradient = Blocks::new(tile.gradient);
        let mut states = tile.states.map(BlocksMut::new);
        let mut copy = tile.copy.map(BlocksMut::new);

        // Loops over arrays, because closures might not be inlined.
        let mut values = [lanes.splat(0.0); STATES];
        for (at, parameters) in tile.parameters.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            lanes.prefetch(parameters.as_ptr().wrapping_add(AHEAD * LANES));
            gradient.prefetch(lanes, at + AHEAD);
            for (value, state) in values.iter_mut().zip(&states) {
                state.prefetch(lanes, at + AHEAD);
                *value = state.load(lanes, at);
            }
            let old = lanes.load_f32(parameters);
            let (new, new_values) = pass.update(lanes, old, gradient.load(lanes, at), values);
            lanes.store_f32(new, parameters);
            for (value, state) in new_values.into_iter().zip(&mut states) {
                state.store(lanes, value, at);
            }
            if let Some(copy) = &mut copy {
                copy.store(lanes, new, at);
            }
        }
        if rest.len() > 0 {
            update_rest(lanes, &pass, rest);
        }
    }
}

/// Less than [`LANES`] elements, by way of arrays of that many.
#[inline(always)]
fn update_rest<L: Lanes, R: Rule<STATES>, const STATES: usize>(
    lanes: L,
    pass: &Pass<R>,
    tile: Tile<'_, STATES>,
) {
    let Tile { parameters, gradient, mut states, copy } = tile;
    let count = parameters.len();
    let mut buffer = [0.0; LANES];
    gradient.read(&mut buffer);
    let gradient = lanes.load_f32(&buffer);
    let mut values = [lanes.splat(0.0); STATES];
    for (value, state) in values.iter_mut().zip(&states) {
        state.read(&mut buffer);
        *value = lanes.load_f32(&buffer);
    }
    buffer[..count].copy_from_slice(parameters);
    let (new, values) = pass.update(lanes, lanes.load_f32(&buffer), gradient, values);
    for (value, state) in values.into_iter().zip(&mut states) {
        lanes.store_f32(value, &mut buffer);
        state.write(&buffer);
    }
    lanes.store_f32(new, &mut buffer);
    parameters.copy_from_slice(&buffer[..count]);
    if let Some(mut copy) = copy {
        copy.write(&buffer);
    }
}
